"""CUDA events, typed."""

import torch


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """Return an event that is not recorded yet; a host that waits for it spins."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
