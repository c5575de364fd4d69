"""A seed fixes the random numbers: the same text in float32, whatever else runs in the engine."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tests.model.checkpoints import make_checkpoint
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient, Event
from twolane.model.load.hub import DEFAULT_MODEL, pull
from twolane.sampling import SamplingParams

SYSTEMS = {
    "static-split": {"look_ahead": "3", "slice_seconds": "0.002"},
    "chunked": {"token_budget": "48"},
}
FILTERS = (
    {},
    {"temperature": 1.5},
    {"temperature": 1.5, "top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05, "temperature": 2.0},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
)
ADJUSTMENTS = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"logit_bias": {7: 3.0, 9: -100.0, 11: 5.0}, "frequency_penalty": 0.7, "min_tokens": 8},
)


@dataclass
class Asked:
    """Requests under way, and what came of them."""

    client: EngineClient
    tokens: dict[str, list[int]] = field(default_factory=dict)
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)

    def ask(self, request: Submit) -> None:
        tokens = self.tokens[request.id] = []
        ended = self._ended[request.id] = asyncio.Event()

        def sink(event: Event) -> None:
            assert isinstance(event, Output), event
            tokens.extend(event.tokens)
            if event.finish is not None:
                ended.set()

        self.client.submit(request, sink)

    async def all(self, requests: list[Submit]) -> list[list[int]]:
        async with asyncio.timeout(240):
            for request in requests:
                await self._ended[request.id].wait()
        return [self.tokens[request.id] for request in requests]


def probes(vocab: int, longest: int, output: int) -> list[Submit]:
    """Every filter with every penalty, each with its own seed and prompt."""
    rng = random.Random(0)
    requests = []
    for i, (chosen, adjusted) in enumerate((f, a) for f in FILTERS for a in ADJUSTMENTS):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest))]
        params = SamplingParams(
            **{"max_tokens": output, "seed": rng.randrange(-(2**63), 2**63), **chosen, **adjusted}
        )
        requests.append(Submit(f"alone{i}", prompt, params))
    return requests


def others(name: str, count: int, vocab: int, longest: int, output: int) -> list[Submit]:
    """What else runs: anything, greedy or not, some of it with the probes' own prompts."""
    rng = random.Random(name)
    asked = probes(vocab, longest, output)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest))]
        shared = rng.choice(asked).prompt[: rng.randrange(1, longest)]
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.randrange(1, 2 * output),
            presence_penalty=rng.choice((0.0, 1.0)),
            logprobs=rng.choice((None, 3)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        whole = shared + prompt if rng.random() < 0.5 else prompt
        requests.append(Submit(f"{name}-{i}", whole, params, priority=rng.choice((0, 0, -1))))
    return requests


async def compare(
    config: EngineConfig, sizes: tuple[int, int, int], loads: list[int], every: int = 1
) -> int:
    """Ask each probe alone, then all of them among others; the requests that lost their pages."""
    client = await EngineClient.start(config)
    try:
        asked = Asked(client)
        alone = []
        for request in probes(*sizes)[::every]:
            asked.ask(request)
            alone += await asked.all([request])
        for load in loads:
            again = [replace(r, id=f"load{load}-{r.id}") for r in probes(*sizes)[::every]]
            crowd = others(f"crowd{load}", load, *sizes)
            mixed = [*again, *crowd]
            random.Random(load).shuffle(mixed)
            for place, request in enumerate(mixed):
                asked.ask(request)
                if place % 4 == 0:  # others come at once: memory runs out however slowly these do
                    await asyncio.sleep(0.002)
            assert await asked.all(again) == alone, f"with {load} others"
            await asked.all(crowd)
        return client.stats.preemptions
    finally:
        await client.close()


@pytest.mark.full
@pytest.mark.parametrize("system", ["static-split", "chunked"])
def test_a_seed_fixes_the_text(system: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a tiny model, with memory that runs out, so that some is recomputed."""
    path = make_checkpoint("llama31", tmp_path_factory.mktemp("seed") / "model", seed=1)
    config = EngineConfig(
        model=str(path),
        dtype="float32",
        system=system,
        options=SYSTEMS[system],
        kv_tokens=272,
        max_running=24,
        # A team of threads crawls where other programs want the cores, too.
        cores=1 if system == "chunked" else None,
    )
    assert asyncio.run(compare(config, (256, 100, 24), [1, 30]))


@pytest.mark.full
def test_a_seed_fixes_the_text_of_the_embedded_model() -> None:
    pull(DEFAULT_MODEL)
    config = EngineConfig(
        model=DEFAULT_MODEL,
        dtype="float32",
        options=SYSTEMS["static-split"],
        kv_tokens=4096,
        max_running=16,
    )
    asyncio.run(compare(config, (49152, 60, 8), [8], every=3))
