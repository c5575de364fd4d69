"""Whether compiled kernels can be used. Without them only `formats` and `tiles` are imported."""

from functools import lru_cache
from importlib.util import find_spec


@lru_cache(1)
def available() -> bool:
    """Return whether `llvmlite` is installed and this CPU adds products of eight bits in 32."""
    if find_spec("llvmlite") is None:
        return False
    from twolane.kernels.cpu.instructions import WIDTH

    return WIDTH > 0
