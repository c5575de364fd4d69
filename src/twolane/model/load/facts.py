"""What a model's files say of it, gathered once before its weights are read. No torch."""

from dataclasses import dataclass

from twolane.model.families.family import Family
from twolane.model.families.registry import FAMILIES
from twolane.model.load.quantization import Quantization
from twolane.model.spec import ModelSpec


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape, the names of its tensors, and the formats of its matrices."""

    name: str
    """The name by which the user asked for the model; errors show it."""
    spec: ModelSpec
    quantization: Quantization | None = None
    """The formats of the linear modules; None: they are stored as floats."""
    vision: bool = False
    """Whether the files hold what reads images, too, which is not loaded."""
    rounded: frozenset[str] = frozenset()
    """The names of tensors that a GGUF file stores in few bits, which are dequantised as they are
    read."""

    @property
    def family(self) -> Family:
        """The names of the model's tensors in each format."""
        return FAMILIES[self.spec.family]
