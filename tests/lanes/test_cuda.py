"""What of the lanes on a GPU needs none."""

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

import twolane
from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings
from twolane.kernels.sampling import MAX_BANNED, pack_params
from twolane.lanes.cuda import device_clock as clock
from twolane.lanes.cuda.decode_graphs import LevelGraphs
from twolane.lanes.cuda.launch_thread import IdleWork, Launcher, Turn
from twolane.lanes.cuda.machine import _check_built, _log_graphs
from twolane.lanes.cuda.slots import _packed
from twolane.lanes.ranks.cuda_follower import FollowerLanes
from twolane.lanes.ranks.followers import FollowerStart, adapter_key
from twolane.lanes.ranks.log_reader import AdapterReports
from twolane.lanes.work import AdapterRecord, Sampling
from twolane.model.spec import ModelSpec
from twolane.sampling import SamplingParams


@pytest.mark.parametrize("count", [0, MAX_BANNED - 1, MAX_BANNED, 100])
def test_a_slot_bans_as_many_as_it_can(count: int) -> None:
    """More are banned outside of the graph (`LogitProcessors`): a request may have any number."""
    params = SamplingParams(stop_token_ids=tuple(range(10, 10 + count)), min_tokens=3)
    known = Sampling(params, seed=0, prompt_tokens=5, eos_token_ids=(2,))
    banned = (2, *params.stop_token_ids) if count < MAX_BANNED else ()
    assert np.array_equal(_packed(known), pack_params(temperature=1.0, limit=8, banned=banned))


def test_inputs_of_layers_are_served_on_one_gpu() -> None:
    spec = ModelSpec("gemma4_text", 2, 64, 4, 2, 16, 96, 256, 128, layer_inputs=16)
    _check_built(spec, 1)
    with pytest.raises(FieldError, match=r"tensor_parallel_size.* must be 1: inputs of each layer"):
        _check_built(spec, 2)


def test_an_adapter_that_a_gpus_rank_cannot_read_does_not_end_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is told, and gives the slot to nobody."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = FollowerStart(DeviceSettings(model=""), 1, (), store.port, 0, 0)

    def read(_: int, path: str, digest: bytes | None) -> None:
        if path == "bad":
            raise ValueError("the files in bad have changed")

    runner: Any = SimpleNamespace(load_adapter=read)
    log = [AdapterRecord(0, path, b"", number) for number, path in enumerate(("bad", "good"))]
    partitions: Any = SimpleNamespace(device=None)
    FollowerLanes(runner, partitions, iter(log), AdapterReports(start)).follow()
    told = [store.get(adapter_key(number, 1)).decode() for number in range(2)]
    assert told == ["the files in bad have changed", ""]


def test_memory_that_other_processes_freed_is_not_called_that_of_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "twolane")
    levels = {8: LevelGraphs({}, {}, 3 << 20, 1.0, 0.5), 16: LevelGraphs({}, {}, -1 << 20, 1.0, 0)}
    _log_graphs("decode", levels)
    assert caplog.messages == [
        "decode graphs on 8 SMs: 1.0 s, after 0.5 s of tuning;"
        " the device's free memory fell by 3 MiB",
        "decode graphs on 16 SMs: 1.0 s, after 0.0 s of tuning",
    ]


class Device:
    """A clock that the test moves, and events that happen when the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self, at: float | None = None, timing: bool = True) -> Any:
        event = SimpleNamespace(at=at, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event


@pytest.mark.parametrize("idle", [0.1, 10.0, 300.0])
def test_a_launch_after_an_idle_time_takes_what_it_takes(
    idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its begin is looked at 3 ms late, and the clocks may have parted by as much."""
    device = Device()
    monkeypatch.setattr(clock, "new_event", device.event)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: device.now))
    here = clock.DeviceClock()
    for at in (1.0, 1.0 + idle):
        begun, ended = device.event(at), device.event(at + 0.004)
        device.now = at + 0.003
        here.seen(begun)
        device.now = at + 0.00402
        assert here.both(begun, ended) == pytest.approx((at, at + 0.004), abs=3e-5)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with ThreadPoolExecutor(1) as thread:
        yield Launcher(thread)


class Launches:
    """What was launched, in order, by a launcher that is held up until it has been asked for all.

    Args:
        held: the turn of what holds it up, a launch of three layers.
    """

    def __init__(self, launcher: Launcher, held: Turn) -> None:
        self.launcher, self.order, self._go = launcher, list[str](), Event()
        between = launcher.between if held == "slice" else lambda: None
        self.launcher.submit(partial(self._held, between), held)

    def _held(self, between: Callable[[], None]) -> None:
        self._go.wait()
        for layer in range(3):
            between()
            self.order.append(f"layer {layer}")

    def ask(self, **turns: Turn) -> list[str]:
        """Ask for launches; the order of all."""
        for name, turn in turns.items():
            self.launcher.submit(partial(self.order.append, name), turn)
        self._go.set()
        self.launcher.thread.submit(lambda: None).result(timeout=60)
        return self.order


def test_a_step_goes_before_the_rest_of_a_slice_and_before_slices_that_wait(
    launcher: Launcher,
) -> None:
    order = Launches(launcher, "slice").ask(next="slice", step="step", other="step")
    assert order == ["step", "other", "layer 0", "layer 1", "layer 2", "next"]


def test_a_step_that_comes_after_a_slice_has_begun_goes_before_its_next_layer(
    launcher: Launcher,
) -> None:
    order = list[str]()

    def slice_() -> None:
        for layer in range(2):
            launcher.between()
            order.append(f"layer {layer}")
            if not layer:
                launcher.submit(partial(order.append, "step"), "step")

    launcher.submit(slice_, "slice")
    launcher.thread.submit(lambda: None).result(timeout=60)
    assert order == ["layer 0", "step", "layer 1"]


@pytest.mark.parametrize("first", ["in order", "slice"])
def test_what_is_launched_in_order_stays_where_it_is(launcher: Launcher, first: Turn) -> None:
    """A pass of the whole device, a step that waits for a slice: nobody goes before them."""
    order = Launches(launcher, first).ask(next="slice", both="in order", step="step", last="slice")
    assert order == ["layer 0", "layer 1", "layer 2", "next", "both", "step", "last"]


def test_a_step_does_not_go_before_the_whole_device(launcher: Launcher) -> None:
    order = Launches(launcher, "in order").ask(step="step", both="in order", other="step")
    assert order == ["layer 0", "layer 1", "layer 2", "step", "both", "other"]


SERVING = (
    *("lanes/cuda/*.py", "lanes/*/cuda_*.py", "kernels/**/*.py", "parallel/*.py"),
    *("model/gpu_*.py", "model/products.py"),
)
"""The source that runs between a launch and its result on a GPU."""
WAITS = ("torch.cuda.synchronize", "torch.cuda.empty_cache")
"""What waits for all that runs on a device, a collective of the other lane included."""
BEFORE_SERVING = {
    ("two_shot.py", "_map"),
    ("decode_graphs.py", "_capture_level"),
    ("layer_graphs.py", "capture"),
    ("lanes.py", "idle"),  # behind the first launches of a start
}
"""Who waits all the same: file, and function."""


def waits(source: str) -> set[str]:
    """The functions in which something waits for the whole device."""
    return {
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WAITS
    }


def test_nothing_waits_for_the_device_once_serving() -> None:
    """A sum over GPUs may be waiting there for one that this rank would launch next."""
    root = Path(twolane.__file__).parent
    files = {path for pattern in SERVING for path in root.glob(pattern)}
    found = {(path.name, name) for path in files for name in waits(path.read_text("utf-8"))}
    assert found == BEFORE_SERVING


def test_what_waits_for_the_device_is_found() -> None:
    assert waits("def launch(self):\n    return submit(torch.cuda.synchronize)") == {"launch"}
    assert waits("def launch(self):\n    stream.synchronize()") == set()


def test_idle_work_runs_between_launches_and_never_beside_one(launcher: Launcher) -> None:
    under_way, order, pieces = list[str](), list[str](), iter(range(6))

    def piece(number: int) -> None:
        assert not under_way
        order.append(f"piece {number}")
        if number == 2:  # a launch comes, and the device takes a while
            under_way.append("step")
            launcher.submit(partial(order.append, "step"), "step")
            Timer(0.2, under_way.clear).start()

    work = IdleWork(launcher, lambda: under_way, (partial(piece, number) for number in pieces))
    work.run()
    ended = [f"piece {number}" for number in range(6)]
    assert order == [*ended[:3], "step", *ended[3:]]


def test_idle_work_ends_with_the_thread_or_at_an_error() -> None:
    done = list[str]()

    def fail() -> None:
        raise RuntimeError("out of memory")

    with ThreadPoolExecutor(1) as thread:
        steps = iter([partial(done.append, "first"), fail, partial(done.append, "never")])
        IdleWork(Launcher(thread), lambda: [], steps).run()
    IdleWork(Launcher(thread), lambda: [], iter([partial(done.append, "never")])).run()
    assert done == ["first"]
