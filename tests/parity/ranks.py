"""Ranks, one or several, that serve one engine after the other."""

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.parity.judge import Judge
from tests.parity.serving import Served, serve_on
from tests.server.serving import PATIENCE
from twolane.devices import DeviceSettings
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import Submit, Vocabulary
from twolane.lanes.disaggregated.cpu_decode import DisaggregatedCpuMachine
from twolane.lanes.load import load
from twolane.lanes.settings import LaneSizes
from twolane.model.load.adapter_files import digest_of
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system


class Ranks:
    """A machine of one rank or several, whose lanes are kept from one engine to the next."""

    def __init__(self, machine: Any, pages: int, page: int, running: int) -> None:
        layout = machine.page_layout
        self.machine, self._pool = machine, (pages * (1 + layout.window_tables), page, running)
        self.wake: Callable[[], None] = lambda: None
        longest = min(1024, machine.spec.max_positions)
        sizes = LaneSizes(*self._pool, longest, window_tables=layout.window_tables)
        self.lanes = machine.start(sizes, self._news, lambda *_: None)

    @property
    def processes(self) -> list[Any]:
        """Those of ranks 1 and up."""
        followers = getattr(self.machine, "followers", None)
        return [] if followers is None else followers.processes

    def _news(self) -> None:
        self.wake()

    def launch_lanes(self, wake: Callable[[], None]) -> "Lent":
        self.wake = wake
        return Lent(self.lanes)

    def close(self, timeout: float = PATIENCE) -> list[int]:
        """End all ranks; the exit codes of ranks 1 and up."""
        self.lanes.close(timeout)
        return [process.returncode for process in self.processes]

    def serve(
        self,
        system: Any,
        submits: list[Submit],
        adapters: Mapping[str, Path] = MappingProxyType({}),
        vocabulary: Vocabulary | None = None,
    ) -> Served:
        spec, layout = self.machine.spec, self.machine.page_layout
        windows = {"window": layout.window, "window_tables": layout.window_tables}
        books = KVCacheManager(*self._pool, prefix_cache=True, **windows)
        return serve_on(self.launch_lanes, spec, books, system, submits, adapters, vocabulary)


class Lent:
    """Lanes that an engine does not end."""

    def __init__(self, lanes: Any) -> None:
        self._lanes = lanes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)

    def close(self) -> None:
        """Others go on with them."""


def apart(path: Path, pages: int, page: int, running: int, **settings: Any) -> Ranks:
    """Two ranks, of which the other one computes prompts; what nobody wrote is no number."""
    asked = DeviceSettings(model=str(path), device="cpu", disaggregated=True, **settings)
    ranks = Ranks(DisaggregatedCpuMachine(asked, lambda *_: None), pages, page, running)
    pool = ranks.lanes._lanes._runner._kv
    for cache in (pool, pool.other):
        for layer in (*cache.k, *cache.v):
            layer.copy_(torch.tensor(torch.nan))
    return ranks


def on_cpu(path: Path, size: int, pages: int, page: int, running: int, **settings: Any) -> Ranks:
    """Ranks that share the cores of this machine."""
    asked = DeviceSettings(model=str(path), device="cpu", tensor_parallel_size=size, **settings)
    return Ranks(load(asked, lambda *_: None), pages, page, running)


def load_where_files_differ(ranks: Ranks, base: Path, folder: Path) -> str:
    """Load an adapter whose files are others when rank 1 reads them; return what is said."""
    from tests.model.adapters import make_adapter  # takes transformers, and seconds

    adapter = make_adapter(base, folder / "some", rank=8, seed=3)
    other = make_adapter(base, folder / "other", rank=8, seed=4)
    own = getattr(ranks.lanes, "_lanes", None) or ranks.lanes.runner  # type: ignore[attr-defined]
    read = own.load_adapter

    def read_before(*asked: Any) -> None:
        read(*asked)
        shutil.copytree(other, adapter, dirs_exist_ok=True)

    own.load_adapter = read_before
    try:
        with pytest.raises(ValueError, match="rank 1: ") as refused:
            ranks.lanes.load_adapter(0, str(adapter), digest_of(adapter))
    finally:
        del own.load_adapter
    ranks.lanes.load_adapter(0, str(adapter), digest_of(adapter))
    return str(refused.value)


def two_streams(ranks: Ranks, requests: list[Submit]) -> Served:
    """Serve prompts beside decode steps, with shared prefixes and where memory runs out."""
    served = ranks.serve(make_system("two-stream"), requests)
    assert served.prefix_hits
    assert served.preemptions
    return served


def next_turn(ranks: Ranks, judge: Judge, page: int) -> Served:
    """Serve a request, and again beside its next turn, which goes on with its answer."""
    from tests.model.checkpoints import VOCAB  # takes transformers, and seconds

    rng, system = random.Random(5), make_system("two-stream")
    params = SamplingParams(temperature=0.0, max_tokens=3 * page, ignore_eos=True)
    first = Submit("first", [rng.randrange(3, VOCAB) for _ in range(page)], params)
    answer = ranks.serve(system, [first]).outputs[0]
    prompt = [*first.prompt, *answer, *(rng.randrange(3, VOCAB) for _ in range(9))]
    other = Submit("other", [9, 8, 7], SamplingParams(temperature=0.0, max_tokens=1))
    served = ranks.serve(system, [first, other, Submit("next", prompt, params)])
    assert served.outputs[0] == answer
    assert not judge.forgiven(prompt, served.outputs[2])
    return served
