"""Orderly end of commands on SIGTERM."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; SIGTERM cancels it, as Ctrl-C does.

    Raises:
        SystemExit: it was cancelled.
    """

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:  # Ctrl-C is a KeyboardInterrupt
        # Exit code after SIGTERM, as in shells.
        raise SystemExit(128 + signal.SIGTERM) from None
