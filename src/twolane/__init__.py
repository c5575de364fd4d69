"""Twolane: an LLM server that runs prefill and decode side by side on one device.

Importing this package loads nothing else, so that the command line handles signals early.
"""

TYPE_CHECKING = False  # as in `typing`, whose import takes as long as Python's start
if TYPE_CHECKING:
    from twolane.llm import LLM
    from twolane.params import LLMSamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    if name == "LLM":
        from twolane.llm import LLM

        return LLM
    if name == "SamplingParams":
        from twolane.params import LLMSamplingParams

        return LLMSamplingParams
    raise AttributeError(f"module 'twolane' has no attribute {name!r}")
