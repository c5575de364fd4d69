"""The parameters of `LLM`: those of the engine, and those of the answers and their text."""

from collections.abc import Mapping, Sequence
from typing import Any

from twolane import sampling

ENGINE_FIELDS = sampling.SamplingParams.__struct_fields__


class LLMSamplingParams(sampling.SamplingParams, frozen=True, kw_only=True):
    """The parameters by which a prompt's answers are made, with the names of vLLM.

    `n`, `stop` and what follows are also keyword arguments of the methods of `LLM`, which have
    precedence.

    Raises:
        FieldError: a parameter is out of range.
    """

    n: int | None = None
    """Number of answers to each prompt; None makes one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the answer where one of them begins."""
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the string or token that stopped it; None: it does not."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text; None: they are."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of a prompt to keep; -1 keeps as many as fit into the context; None
    keeps all."""

    structured_outputs: Mapping[str, Any] | None = None
    """Format of the answer, as the field of this name of /v1/completions; None: free text."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `LLM` among the parameters, as far as they are set."""
        names = self.__struct_fields__[len(ENGINE_FIELDS) :]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def of_engine(self) -> sampling.SamplingParams:
        """The engine's part of the parameters."""
        return sampling.SamplingParams(**{name: getattr(self, name) for name in ENGINE_FIELDS})
