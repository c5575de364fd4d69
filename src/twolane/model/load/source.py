"""Sources of tensors for loading weights."""

from typing import Any, Protocol

from twolane.model.sharding import Cut


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, without reading the tensor."""

    def type(self, name: str) -> str:
        """Type of the tensor's numbers, as safetensors names it."""

    def get(self, name: str, cut: Cut | None = None) -> Any:
        """Return the tensor or a part of it: torch or numpy, of any dtype."""
