"""`twolane doctor`: report on this machine or on a model's files."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table

import twolane
from twolane.cli.complete import models, systems
from twolane.cli.errors import one_line_errors, wrong_setting
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.common.errors import FieldError
from twolane.common.options import docstrings
from twolane.common.resources import free_memory, total_memory, usable_cores
from twolane.model.load import hub
from twolane.systems.registry import SYSTEMS, defaults, describe, system_class

MODEL = "A model as for `twolane serve`, to show what is read of its files."

app = command_app()


@app.command(cls=Command)
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", autocompletion=models, help=MODEL, show_default=False),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Print the tokens of this text for MODEL: id, name and text of each."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File of a chat template in place of MODEL's own.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Print the settings of this system.", autocompletion=systems)
    ] = None,
) -> None:
    """Show what this machine can do, or what a model's files say.

    Without MODEL, the exit code is 0 if serving is possible here, else 1.

    With --system, show the settings of that system.

    With MODEL, show what is read of its files (the tokenizer, BOS, each EOS and the chat template),
    and the file that each comes from.
    """
    if system is not None:
        if model is not None or tokens is not None:
            raise wrong_setting(FieldError("system", "is shown without MODEL and --tokens"))
        with one_line_errors():
            show_system(system)
        raise typer.Exit
    if model is None:
        for name, value in (("tokens", tokens), ("chat_template", chat_template)):
            if value is not None:
                raise wrong_setting(FieldError(name, "needs MODEL"))
        raise typer.Exit(0 if report() else 1)
    from twolane.cli.doctor_model import report as report_model

    with one_line_errors():
        report_model(model, tokens, chat_template)


def report() -> bool:
    """Print what this machine can do; return whether serving is possible here."""
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in findings():
        table.add_row(name, text)
    console.print(table)
    problem = cpu_problem()
    console.print(f"Serving is not possible: {problem}" if problem else "Serving is possible.")
    return problem is None


def show_system(name: str) -> None:
    """Print what a system does, and the default and the meaning of each of its settings."""
    console, table = Console(), Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    system: type = system_class(name)
    meanings = docstrings(system)
    for key, value in defaults(name).items():
        setting = key if value is msgspec.NODEFAULT else f"{key}={value}"
        table.add_row(setting, meanings.get(key, ""))
    console.print(f"{name}: {describe(name)} Its settings, as --option KEY=VALUE:")
    console.print(table)


def findings() -> Iterator[tuple[str, RenderableType]]:
    """Yield the rows of the report."""
    yield "twolane", twolane.__version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", version("torch")
    yield "cores", f"{len(usable_cores())} usable of {os.cpu_count()}{affinity()}"
    yield "memory", memory()
    problem = cpu_problem()
    yield "cpu lanes", problem or f"work; partitions (prefill, decode): {cpu_partitions()}"
    yield "cuda lanes", "none: see the CPU lanes" if problem else cuda_lanes()
    yield "ranks", problem or ranks()
    yield "1P1D", problem or disaggregated()
    yield "fp8", problem or fp8_support()
    for place, name in enumerate(SYSTEMS):
        yield "systems" if place == 0 else "", f"{name}: {describe(name)}"
    yield "", "twolane doctor --system NAME says what each --option of a system means"
    yield "cache", str(hub.cache_dir())
    yield "pulled", ", ".join(pulled()) or "nothing yet: twolane pull"


def affinity() -> str:
    """Return the numbers of the cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return ", threads cannot be pinned on this system"
    return f", numbers {', '.join(map(str, usable_cores()))}"


def memory() -> str:
    """Return how much memory there is, and how much of it an engine would find."""
    return f"{total_memory() / 2**30:.1f} GiB, {free_memory() / 2**30:.1f} GiB free"


def cpu_problem() -> str | None:
    """Return why the CPU lanes cannot work, or None."""
    try:
        import torch

        torch.ones(2) @ torch.ones(2)
    except (ImportError, OSError, RuntimeError) as error:
        return f"PyTorch does not work: {error}"
    return None


def cpu_partitions() -> str:
    """Return the partitions that the CPU lanes offer."""
    from twolane.lanes.cpu.lanes import partitions

    return " ".join(f"({prefill},{decode})" for prefill, decode in partitions(len(usable_cores())))


def cuda_lanes() -> str:
    """Return which levels the first CUDA device offers, or why there are none."""
    import torch

    if torch.version.cuda is None:
        return "none: this build of PyTorch has no CUDA"
    if not torch.cuda.is_available():
        return f"none: PyTorch has CUDA {torch.version.cuda}, but finds no device or driver"
    from twolane.lanes.cuda.green_contexts import GreenContexts, NoGreenContexts

    name = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    try:
        levels = GreenContexts(0).offered
    except NoGreenContexts as error:
        return f"only the whole device: {error} ({name})"
    offered = " ".join(f"({prefill},{decode})" for prefill, decode in levels)
    return f"work; levels (prefill, decode SMs): {offered} ({name})"


def ranks() -> str:
    """Return how many devices can share a model (--tensor-parallel-size), and how they sum."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "processes that share the cores, to try and to test"
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    if count == 1:
        return f"one: several need as many GPUs of one host ({names[0]})"
    if len(names) > 1:
        return f"none of all {count} GPUs, which are not alike: {', '.join(names)}"
    from twolane.lanes.ranks.cuda_machine import sum_methods

    try:
        return f"up to {count} GPUs, which sum by {sum_methods(count)} ({names[0]})"
    except RuntimeError as error:
        return f"none: {error}"


def disaggregated() -> str:
    """Return which devices prefill and decode can have for themselves (--disaggregated)."""
    import torch

    from twolane.lanes.disaggregated.cpu_decode import halves

    prefill, decode = (", ".join(map(str, cores)) for cores in halves(usable_cores()))
    cores = f"prefill on cores {prefill}, decode on cores {decode}"
    if not torch.cuda.is_available():
        return cores
    from twolane.lanes.disaggregated.cuda_decode import lacks

    if lacking := lacks():
        return f"{cores}; on GPUs it {lacking}"
    return f"prefill on GPU 1, decode on GPU 0; without GPUs {cores}"


def fp8_support() -> str:
    """Return what weights (--quantization fp8) and KV cache (--kv-cache-dtype fp8) gain here."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return "weights and KV cache are served; on a CPU they save memory, not time"
    major, minor = torch.cuda.get_device_capability(0)
    name = f"{torch.cuda.get_device_name(0)}, compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        return f"none: e4m3 needs compute capability 8.9 or more ({name})"
    if (major, minor) == (9, 0):
        gain = "with its own profile, KV in FP8 held 6 to 9 % more requests of Qwen3-8B"
        return f"weights and KV cache, by tensor cores and own kernels; {gain} ({name})"
    return f"weights by PyTorch and KV cache by Triton; neither was ever tried there ({name})"


def pulled() -> list[str]:
    """Return the aliases whose models are in the cache."""
    return [alias for alias in hub.ALIASES if any((hub.cache_dir() / alias).glob("*.gguf"))]
