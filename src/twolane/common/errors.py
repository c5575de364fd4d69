"""Errors that name the field at fault, so that no caller parses a message."""


class FieldError(ValueError):
    """A field of a settings struct or of a request has a value that is refused.

    Args:
        field: name of the field in its struct.
        problem: What is wrong with the field; it continues a sentence that begins with the field's
            name.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"
