"""The files of a LoRA adapter as PEFT writes them, and their digest."""

import hashlib
from pathlib import Path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def digest_of(path: Path) -> bytes | None:
    """Return the SHA-256 of the SHA-256s of an adapter's files; None: they cannot be read.

    Args:
        path: directory of the adapter.
    """
    whole = hashlib.sha256()
    try:
        for name in (CONFIG, TENSORS):
            if not (path / name).is_file():  # a pipe or a device may never end
                return None
            with (path / name).open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return None
    return whole.digest()


def digest_of_contents(*contents: bytes) -> bytes:
    """Return the same of files that have been read, in the order of `CONFIG`, `TENSORS`."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(hashlib.sha256(content).digest())
    return whole.digest()
