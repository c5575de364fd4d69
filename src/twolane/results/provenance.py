"""Provenance of result files: command, commit, machine, versions and workload."""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import twolane
from twolane.common.files import write_atomically
from twolane.common.resources import cpu_name, usable_cores

COMMIT = "TWOLANE_COMMIT"
"""Environment variable with the commit of a source tree without git's history."""
CORES = len(usable_cores())
"""Number of cores that this process could use when it began; clients of servers keep few."""
SMI_FIELDS = ("name", "power.limit", "clocks.max.sm", "driver_version")
"""Fields that `nvidia-smi` is asked for."""
SECRET = ("--api-key", "--header", "--hf-token")
"""Options whose values are removed from a recorded command."""
SECRET_VALUE = re.compile(rf"((?:{'|'.join(SECRET)})[= ])(?:'[^']*'|\"[^\"]*\"|\S+)")
"""Such an option with its value in one word, or within a quoted command."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The record at the head of every file of results; null is what is not known."""

    command: str | None
    """Command line, quoted for a shell."""
    date: str | None
    """ISO 8601 time at which the record was made."""
    commit: str | None
    """Commit of the source, followed by `-dirty` if tracked files were changed."""
    card: str | None
    """GPUs that the command could use, with power limit and top clock; null on a CPU."""
    driver: str | None
    """Version of the NVIDIA driver; null without one."""
    cpu: str | None
    """Name of the CPU, and the number of cores that the command could use when it began."""
    versions: dict[str, str]
    """Versions by name: python, twolane and the libraries that decide about speed."""
    workload: Any
    """Workload: a name, or the options that determine it."""
    notes: str | None = None
    """Remarks for readers."""


def provenance(workload: Any = None, command: Sequence[str] | None = None) -> Provenance:
    """Return the record of the running command.

    Args:
        workload: see `Provenance.workload`; anything that msgspec encodes.
        command: words of the command line; by default this process's own.
    """
    card, driver = gpus()
    return Provenance(
        command=shlex.join(command or own_command()),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        card=card,
        driver=driver,
        cpu=f"{cpu_name()}, {CORES} cores",
        versions=versions(),
        workload=workload,
    )


def save(path: Path, about: Provenance, content: Mapping[str, object]) -> None:
    """Write a file of results atomically: the record, then the figures.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, json_bytes({"provenance": about, **content}))


def json_bytes(content: object) -> bytes:
    """Return content as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def own_command() -> list[str]:
    """Return the words of this process's command, without its program's folder and secrets."""
    program, words = Path(sys.argv[0]), _named_outputs(without_secrets(sys.argv[1:]))
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *words]
    if program.suffix == ".py" or program.is_dir():  # a folder's __main__.py
        return ["python", str(_from_checkout(program)), *words]
    return [program.name, *words]


def _named_outputs(words: Sequence[str]) -> list[str]:
    """Return a command's words without the folders of outputs and temporary files, which concern
    one machine."""
    temporary = tempfile.gettempdir()
    return [
        Path(word).name
        if (place and words[place - 1] == "--out") or Path(word).is_relative_to(temporary)
        else word
        for place, word in enumerate(words)
    ]


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command's words with the values of `SECRET` options hidden."""
    shown = [SECRET_VALUE.sub(r"\1HIDDEN", word) for word in words]
    for place, word in enumerate(words):
        if word.partition("=")[0] in SECRET and "=" in word:
            shown[place] = f"{word.partition('=')[0]}=HIDDEN"
    for place, word in enumerate(words[:-1]):
        if word in SECRET:
            shown[place + 1] = "HIDDEN"
    return shown


def _from_checkout(program: Path) -> Path:
    """Return a script's path relative to this source's checkout, if it is in there."""
    root = Path(twolane.__file__).parents[2]
    resolved = program.resolve()
    return resolved.relative_to(root) if resolved.is_relative_to(root) else program


@functools.cache
def commit() -> str | None:
    """Return the commit of the running source, followed by `-dirty` if tracked files differ.

    TWOLANE_COMMIT counts where git does not know the source.
    """
    here = Path(twolane.__file__).parent
    if _output_of("git", "-C", str(here), "ls-files", "--error-unmatch", "__init__.py") is None:
        return os.environ.get(COMMIT)
    head = _output_of("git", "-C", str(here), "rev-parse", "HEAD")
    # Path that git ignores when it looks for changes, since series of runs write there.
    changed = _output_of(
        *("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"),
        *("--", ":/", ":(top,exclude)benchmarks/results"),
    )
    return f"{head}-dirty" if changed else head


@functools.cache
def gpus() -> tuple[str | None, str | None]:
    """Return the names of the visible GPUs and the driver's version, None without a GPU."""
    query = f"--query-gpu={','.join(SMI_FIELDS)}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return None, None
    which = [] if visible is None else [f"--id={visible}"]
    output = _output_of("nvidia-smi", query, "--format=csv,noheader", *which)
    rows = [line.rpartition(", ") for line in (output or "").splitlines()]
    if not rows:
        return None, None
    cards = Counter(card for card, _, _ in rows)
    named = [card if count == 1 else f"{count} of {card}" for card, count in cards.items()]
    return "; ".join(named), rows[0][2]


def versions() -> dict[str, str]:
    """Return the versions of Python, Twolane and the libraries that are installed."""
    found = {"python": platform.python_version(), "twolane": twolane.__version__}
    # Distributions whose versions are recorded if they are installed.
    for name in ("torch", "transformers", "flashinfer-python", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _output_of(*words: str) -> str | None:
    """Return a command's output; None: it is missing or fails."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
