"""The LoRA adapters that are loaded: by name, and by slot in the lanes.

A slot is given to another adapter when no request and no launch names it any more. The prefix tree
identifies the pages of adapters by the digest of their files, as other servers and routers do.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twolane.common.errors import FieldError
from twolane.engine.kv.page_hash import adapter_of, salt_bytes
from twolane.engine.messages import AdapterResult
from twolane.model.load.adapter_files import digest_of


class AdapterLanes(Protocol):
    """The part of `Lanes` that loads adapters."""

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`."""

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a slot."""

    slot: int
    digest: bytes
    """Digest of its files, by which its pages are known."""

    def salt(self, cache_salt: str | None) -> bytes:
        """Return the salt that pages of this adapter and tenant share."""
        return salt_bytes(cache_salt, self.digest)


class AdapterRegistry:
    """The engine's adapters; it belongs to the loop's thread, and reads files on another.

    Args:
        lanes: The lanes that load the adapters.
        slots: number of adapters at a time; 0: none is served.
        notify: wakes the loop; called from another thread when one has been read.
    """

    def __init__(
        self, lanes: AdapterLanes, slots: int, notify: Callable[[], None] = lambda: None
    ) -> None:
        self._lanes = lanes
        self._slots = slots
        self._free = list(reversed(range(slots)))
        self._notify = notify
        self._names: dict[bytes, str] = {}
        """The latest name of each adapter, by digest."""
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, tuple[int, Future[bytes]]] = {}
        self._leaving: dict[str, LoadedAdapter] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.results: list[AdapterResult] = []
        """Results that have not been sent to the API process."""

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the adapter for new requests of this name; None if none is loaded."""
        return self._loaded.get(name)

    def name_of(self, salt: bytes) -> str | None:
        """Return the name of the adapter with pages of this salt; None for the base model."""
        return self._names.get(adapter_of(salt))

    def digests(self) -> dict[str, str]:
        """Digests of the adapters that are loaded, in hexadecimal, by name."""
        return {name: each.digest.hex() for name, each in self._loaded.items()}

    def load_at_start(self, name: str, path: str) -> None:
        """Load an adapter before anything is served.

        Raises:
            FieldError: it cannot be.
        """
        try:
            slot = self._place(name)
            digest = self._read(slot, path)
        except ValueError as error:
            raise FieldError("lora", f"{name}: {error}") from error
        self._add(name, LoadedAdapter(slot, digest))

    def load(self, name: str, path: str) -> None:
        """Begin to load an adapter; `settle` reports the result."""
        try:
            slot = self._place(name)
        except ValueError as error:
            self.results.append(AdapterResult(name, loaded=False, problem=str(error)))
            return
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "adapters")
        done = self._reader.submit(self._read, slot, path)
        self._loading[name] = slot, done
        done.add_done_callback(lambda _: self._notify())

    def unload(self, name: str) -> None:
        """Hide an adapter from new requests; `settle` reports when the last one has ended."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            problem = f"no adapter {name!r} is loaded"
            self.results.append(AdapterResult(name, loaded=False, problem=problem))
        else:
            self._leaving[name] = adapter

    def settle(self, named: Callable[[], Collection[int]]) -> bool:
        """Finish loads that are read and unloads that nothing uses; return whether any ended.

        Args:
            named: gives the slots that requests and launches name.
        """
        for name, (slot, done) in list(self._loading.items()):
            if done.done():
                del self._loading[name]
                self._take(name, slot, done)
        if self._leaving:
            used = named()
            gone = [name for name, each in self._leaving.items() if each.slot not in used]
            for name in gone:
                self._lanes.drop_adapter(slot := self._leaving.pop(name).slot)
                self._free.append(slot)
                self.results.append(AdapterResult(name, loaded=False))
        return bool(self.results)

    def close(self) -> None:
        """Cancel the loads that have not begun."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, slot: int, path: str) -> bytes:
        """Load an adapter and return the digest of its files.

        Raises:
            ValueError: it cannot be served; or its files change, so that other ranks may have read
                others.
        """
        digest = digest_of(Path(path))
        self._lanes.load_adapter(slot, path, digest)
        if digest is None or digest_of(Path(path)) != digest:
            raise ValueError(f"the files in {path} change while they are read")
        return digest

    def _add(self, name: str, adapter: LoadedAdapter) -> None:
        self._loaded[name] = adapter
        self._names[adapter.digest] = name

    def _take(self, name: str, slot: int, done: "Future[bytes]") -> None:
        error = done.exception()
        if error is None:
            adapter = LoadedAdapter(slot, done.result())
            self._add(name, adapter)
            self.results.append(AdapterResult(name, loaded=True, digest=adapter.digest.hex()))
        elif isinstance(error, Exception):  # a bad file ends nothing else
            problem = str(error) if isinstance(error, ValueError) else repr(error)
            self._free.append(slot)
            self.results.append(AdapterResult(name, loaded=False, problem=problem))
        else:
            raise error

    def _place(self, name: str) -> int:
        """Take a slot for a new adapter.

        Raises:
            ValueError: there is none, or the name is in use.
        """
        if name in self._loaded or name in self._loading:
            raise ValueError(f"an adapter {name!r} is loaded already: unload it first")
        if name in self._leaving:
            raise ValueError(f"an adapter {name!r} is being unloaded, and requests still use it")
        if not self._slots:
            raise ValueError("adapters are not served: start with --lora or --lora-endpoints")
        if not self._free:
            raise ValueError(
                f"{self._slots} adapters are loaded, and no more are served at a time (--max-loras)"
            )
        return self._free.pop()
