"""Shell completions of options and arguments."""


def systems(incomplete: str) -> list[tuple[str, str]]:
    """Return the systems with their descriptions."""
    from twolane.systems.registry import SYSTEMS, describe

    return [(name, describe(name)) for name in SYSTEMS if name.startswith(incomplete)]


def aliases(incomplete: str) -> list[str]:
    """Return the models that can be fetched by a name of their own."""
    from twolane.model.load.hub import ALIASES

    return [name for name in ALIASES if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the aliases and the built-in shapes."""
    from twolane.model.shapes import SHAPES

    named = dict.fromkeys((*aliases(incomplete), *SHAPES))  # an alias has a shape, too
    return [name for name in named if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """Return the simulated GPUs."""
    from twolane.sim.gpus import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def datasets(incomplete: str) -> list[str]:
    """Return the workloads by name; the shell itself offers files."""
    from twolane.workload.spec import DRAWN, RANDOM

    return [name for name in (RANDOM, *DRAWN) if name.startswith(incomplete)]


COMPLETIONS = {"system": systems, "gpu": gpus, "dataset": datasets}
"""Completions by the name of the option."""
