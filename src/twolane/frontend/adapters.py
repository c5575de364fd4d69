"""LoRA adapters of the engine, as the API process knows them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from twolane.engine.messages import AdapterResult, LoadAdapter, ToEngine, UnloadAdapter


class AdapterRefused(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded adapter."""

    path: str
    created: int
    """Time of loading, in seconds since the epoch."""
    digest: str
    """Hexadecimal digest of its files, which identifies its cached pages."""


class Adapters:
    """Keeps the names of loaded adapters, and has the engine load and unload adapters.

    Args:
        loaded: path by name, of those that the engine starts with.
        digests: digests of the adapters' files, by name.
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
        """Adapters for new requests, by name."""
        self._send = send
        self._changing: dict[str, tuple[str, asyncio.Future[None]]] = {}
        """Path and waiting caller of adapters whose loading or unloading is not done, by name."""

    async def load(self, name: str, path: str) -> None:
        """Load an adapter from a directory.

        Raises:
            AdapterRefused: it cannot be served.
            EngineError: the engine is gone.
        """
        await self._change(name, path, LoadAdapter(name, path))

    async def unload(self, name: str) -> None:
        """Withdraw an adapter from new requests, and wait until requests with it have ended.

        Raises:
            AdapterRefused: there is none of that name.
            EngineError: the engine is gone.
        """
        await self._change(name, "", UnloadAdapter(name))

    def take(self, news: Iterable[AdapterResult]) -> None:
        """Record the results of loading and unloading."""
        for result in news:
            path, waiting = self._changing.pop(result.name)
            if result.loaded:
                self.loaded[result.name] = AdapterInfo(path, int(time.time()), result.digest)
            if waiting.done():
                continue  # whoever waited was cancelled
            if result.problem is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(AdapterRefused(result.problem))

    def fail(self, error: Exception) -> None:
        """Fail all waiting callers: the engine is gone."""
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
