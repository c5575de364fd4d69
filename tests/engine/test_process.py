"""The engine process: how it starts, how it ends, and what it costs over time."""

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import make_checkpoint
from tests.parity.short_of_memory import SAID
from tests.server.serving import PATIENCE
from twolane.cli.errors import with_flags
from twolane.common.errors import FieldError
from twolane.engine.build import build
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient, Event
from twolane.model.load import weights
from twolane.sampling import SamplingParams
from twolane.slo import Slo

KV_TOKENS = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("qwen2", tmp_path_factory.mktemp("process") / "model"))


def with_engine(
    use: Callable[[EngineClient], Coroutine[Any, Any, None]], model: str, **settings: Any
) -> None:
    async def run() -> None:
        client = await EngineClient.start(
            EngineConfig(model=model, kv_tokens=KV_TOKENS, max_running=32, **settings)
        )
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(run())


async def serve(client: EngineClient, name: str, count: int) -> int:
    """Run so many requests of all lengths at once; how many ended as they should."""
    rng = random.Random(name)
    left, all_ended, good = count, asyncio.Event(), 0

    def sink(event: Event) -> None:
        nonlocal left, good
        if isinstance(event, Output) and event.finish is None:
            return
        left -= 1
        good += isinstance(event, Output) and event.finish in ("stop", "length")
        if left == 0:
            all_ended.set()

    for i in range(count):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 300))]
        params = SamplingParams(seed=i, max_tokens=rng.randrange(1, 24))
        client.submit(Submit(f"{name}-{i}", prompt, params), sink)
    await all_ended.wait()
    return good


def resident(pid: int) -> float:
    """MiB of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def test_a_gpu_without_memory_is_one_line_that_says_what_to_set(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(weights._Loader, "weights", full)
    with pytest.raises(FieldError) as refused:
        build(EngineConfig(model=model, device="cpu"), lambda: None, lambda *_: None)
    line = with_flags(str(refused.value))
    assert "\n" not in line
    for word in (
        "--gpu-memory-utilization is 0.9",
        "1.50 GiB",
        "--quantization",
        "--tensor-parallel-size",
    ):
        assert word in line


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.full
def test_memory_is_flat_and_all_pages_come_back(model: str) -> None:
    """After the first 300 requests, which fill the caches of kernels and prefixes."""

    async def use(client: EngineClient) -> None:
        assert await serve(client, "warm", 300) == 300
        before = resident(client.process.pid)
        assert await serve(client, "more", 1500) == 1500
        assert resident(client.process.pid) < before + 64
        pages = KV_TOKENS // 16
        await until(lambda: client.stats.kv_pages_free + client.stats.kv_pages_cached == pages)
        assert client.stats.running == client.stats.prefilling == client.stats.waiting == 0

    with_engine(use, model)


def test_aborted_requests_return_their_pages_at_rest(model: str) -> None:
    """The gauges reach the API process although no token follows."""

    async def use(client: EngineClient) -> None:
        begun = asyncio.Event()
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        client.submit(Submit("long", [5] * 100, params), lambda _: begun.set())
        await begun.wait()
        client.abort("long")
        await until(
            lambda: (
                client.stats.kv_pages_free + client.stats.kv_pages_cached == client.stats.kv_pages
            )
        )

    with_engine(use, model)


def test_signals_to_stop_are_for_the_front(model: str) -> None:
    async def use(client: EngineClient) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            client.process.send_signal(number)
        assert await serve(client, "after", 5) == 5

    with_engine(use, model)


def test_tokens_under_a_tbt_bound_wait_until_they_are_due_or_the_engine_dies(model: str) -> None:
    handed: list[tuple[str, list[int]]] = []

    def sink(event: Event) -> None:
        assert isinstance(event, Output)
        handed.append((event.id, event.tokens))

    def at_rest(client: EngineClient) -> bool:
        stats = client.stats
        taken = stats.prefix_queries == 2 * 20
        return taken and stats.running == stats.prefilling == stats.waiting == 0

    async def use(client: EngineClient) -> None:
        two = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        for name, slo in (("free", Slo()), ("bound", Slo(tbt=3600.0))):
            client.submit(Submit(name, [5] * 20, two, slo=slo), sink)
        await until(lambda: at_rest(client))
        assert [name for name, tokens in handed for _ in tokens] == ["free", "free"]
        client.process.kill()
        await client.failed.wait()

    with_engine(use, model, tbt_buffer=3600.0)
    tokens = {name: [t for each, new in handed if each == name for t in new] for name, _ in handed}
    assert len(tokens["bound"]) == 2
    assert tokens["bound"] == tokens["free"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 64, "max_model_len": 128}, "kv_tokens 64 does not hold one request of 128"),
        ({"kv_tokens": 10**12}, "kv_tokens 1000000000000: they take "),
        ({"max_model_len": 5000}, "max_model_len 5000 exceeds the model's 1024 positions"),
        ({"cores": 1000}, "cores must be between 1 and"),
        ({"system": "none"}, "system 'none' is unknown"),
        ({"system": "chunked", "options": {"k": "1"}}, "options 'k' is not one of system chunked"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        build(EngineConfig(model=model, **settings), lambda: None, lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 64, "max_model_len": 128}, "kv_tokens 64 does not hold one request of 128"),
        pytest.param(
            {"trace": "/nowhere/trace.json"}, "/nowhere/trace.json", marks=pytest.mark.full
        ),
    ],
)
def test_what_the_process_refuses_is_said_by_who_started_it(
    model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        asyncio.run(EngineClient.start(EngineConfig(model=model, **settings)))


@pytest.mark.parametrize(
    "system",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("chunked", "prefill-first")),
        "static-split",
    ],
)
def test_a_trace_is_valid_json_and_accounts_for_every_request(
    model: str, system: str, tmp_path: Path
) -> None:
    import json

    trace = tmp_path / "trace.json"

    async def use(client: EngineClient) -> None:
        assert await serve(client, "traced", 20) == 20

    with_engine(use, model, system=system, trace=str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))
    begun = {e["id"] for e in events if e["ph"] == "b"}
    ended = {e["id"] for e in events if e["ph"] == "e"}
    assert begun == ended == {f"traced-{i}" for i in range(20)}
    launches = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["args"]["reason"] for e in launches)
    served = {request for e in launches for request in e["args"]["requests"]}
    assert served == begun
    (about,) = [e["args"] for e in events if e["name"] == "twolane"]
    assert (about["system"], about["options"]) == (system, {})
    assert {e["args"]["units"] for e in launches} <= {n for level in about["levels"] for n in level}
    used = [e["args"]["pages_used"] for e in events if e["name"] == "pages_used"]
    assert 0 < max(used) <= about["kv_pages"]
