"""Twolane: an LLM server that runs prefill and decode side by side on one device.

Importing this package is cheap: PyTorch is loaded only by what needs it.
"""

from typing import TYPE_CHECKING

from twolane.sampling import SamplingParams

if TYPE_CHECKING:
    from twolane.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "LLM":
        from twolane.llm import LLM

        return LLM
    raise AttributeError(f"module 'twolane' has no attribute {name!r}")
