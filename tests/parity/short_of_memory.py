"""A rank other than 0 whose GPU has too little memory for its part of the weights."""

import sys

import torch

from twolane.lanes.ranks import cpu_follower

SAID = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 0.50 GiB is free. Process 7 has 78.61 GiB memory in use."
)
"""What PyTorch says."""


def load(*_: object) -> None:
    """Find no memory."""
    raise torch.OutOfMemoryError(SAID)


if __name__ == "__main__":
    cpu_follower.load_shard = load  # type: ignore[assignment]
    sys.exit(cpu_follower.main())  # type: ignore[func-returns-value]
