"""The LoRA adapters that the engine has loaded, as the API process knows them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from twolane.engine.messages import AdapterNews, LoadAdapter, ToEngine, UnloadAdapter


class AdapterRefused(ValueError):
    """An adapter is not loaded or unloaded; the message says why."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that requests can ask for."""

    path: str
    created: int
    """When it was loaded, in seconds since the epoch."""
    digest: str
    """Digest of its files in hexadecimal, by which its cached pages are known."""


class Adapters:
    """Keeps the names of adapters, and has the engine load and unload them.

    Args:
        loaded: path by name, of those that the engine starts with.
        digests: of the same, by name.
        send: sends a message to the engine.
    """

    def __init__(
        self,
        loaded: Mapping[str, str],
        digests: Mapping[str, str],
        send: Callable[[ToEngine], None],
    ) -> None:
        now = int(time.time())
        self.loaded = {name: AdapterInfo(path, now, digests[name]) for name, path in loaded.items()}
        """Those that new requests can ask for, by name."""
        self._send = send
        self._changing: dict[str, tuple[str, asyncio.Future[None]]] = {}
        """Path, and who waits, of those whose news have not come."""

    async def load(self, name: str, path: str) -> None:
        """Load an adapter from a directory.

        Raises:
            AdapterRefused: it cannot be served.
            EngineError: the engine is gone.
        """
        await self._change(name, path, LoadAdapter(name, path))

    async def unload(self, name: str) -> None:
        """Give an adapter to no new request, and wait until those that have it have ended.

        Raises:
            AdapterRefused: there is none of that name.
            EngineError: the engine is gone.
        """
        await self._change(name, "", UnloadAdapter(name))

    def take(self, news: Iterable[AdapterNews]) -> None:
        """Note what came of what the engine was asked."""
        for told in news:
            path, waiting = self._changing.pop(told.name)
            if told.loaded:
                self.loaded[told.name] = AdapterInfo(path, int(time.time()), told.digest)
            if waiting.done():
                continue  # whoever waited was cancelled
            if told.problem is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(AdapterRefused(told.problem))

    def fail(self, error: Exception) -> None:
        """End all waits: the engine is gone."""
        for _, waiting in self._changing.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._changing.clear()

    async def _change(self, name: str, path: str, message: ToEngine) -> None:
        if name in self._changing:
            raise AdapterRefused(f"an adapter {name!r} is being loaded or unloaded")
        self._send(message)
        if isinstance(message, UnloadAdapter):
            self.loaded.pop(name, None)
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing[name] = path, waiting
        await waiting
