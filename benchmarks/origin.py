"""What files of results say of where they come from, and how they are written."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from twolane import __version__


def origin() -> dict[str, Any]:
    """The command, the commit, the date and the versions."""
    import torch  # not by those who only save: panels.py starts many processes

    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output("git", "rev-parse", "HEAD"),
        "versions": {
            "twolane": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def gpu_origin() -> dict[str, Any]:
    """The same, and the GPUs."""
    import torch

    found, query = origin(), "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
    found["gpu"] = output("nvidia-smi", query, "--format=csv,noheader")
    found["versions"]["cuda"] = torch.version.cuda
    return found


def output(*words: str) -> str:
    """What a command says; nothing if there is none."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def save(path: Path, content: object) -> None:
    """Write a file of results."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
