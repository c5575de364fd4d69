"""Requests whose answers are known: what a CPU says, in float64, to each of them alone.

Random schedules draw from it, so that thousands of them need no reference of their own. It holds
only requests whose tokens stay the same when their logits are disturbed by more than float32 on
any device does: where the model is in doubt, neither answer is wrong.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tests.model.checkpoints import POSITIONS, VOCAB, load_decoder, make_checkpoint
from tests.model.doubled import doubled
from twolane.engine.messages import Submit
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    Scoring,
    SlotUpdate,
    pack,
)
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve
from twolane.sampling import SamplingParams

PAGE = 16
EOS = (2,)
SHORT, FILLING, LONG = 64, 8, 16
"""Requests of each kind that are drawn; those in doubt are left out."""
FAMILY_TOKENS, LONG_FAMILY_TOKENS = 64, 640
NOISE = 5e-4
"""Of a logit; float32 on a GPU is off by a tenth of that."""


class Answer(msgspec.Struct):
    """What a request gets: tokens, and the log-probabilities that it asks for."""

    tokens: list[int] = []
    logprobs: list[float] = []
    prompt_logprobs: list[float] = []


class Entry(msgspec.Struct):
    """A request and its answer."""

    submit: Submit
    answer: Answer


class Catalogue(msgspec.Struct):
    """Entries by what a schedule needs them for."""

    short: list[Entry]
    filling: list[Entry]
    """Prompts of 5 pages whose answers take two more."""
    long: list[Entry]
    """Prompts long enough that prefill attention splits them over the SMs."""


class Noisy(Decoder):
    """A decoder that is a little off."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self._noise = torch.Generator().manual_seed(seed)

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        noise = torch.rand(logits.shape, generator=self._noise, dtype=logits.dtype)
        return logits + NOISE * (2 * noise - 1)


def prepare(folder: Path) -> Catalogue:
    """The catalogue of the checkpoint in `folder`; both are made if they are not there."""
    file, model = folder / "catalogue.json", folder / "model"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Catalogue)
    make_checkpoint("qwen2", model, seed=1)
    catalogue = _make(doubled(load_decoder(resolve(str(model)))), random.Random(0))
    file.write_bytes(msgspec.json.encode(catalogue))
    return catalogue


def _make(decoder: Decoder, rng: random.Random) -> Catalogue:
    families = [[rng.randrange(3, 250) for _ in range(LONG_FAMILY_TOKENS)] for _ in range(3)]
    short: list[Entry] = []
    for i in range(SHORT):
        short += _entry(decoder, Submit(f"short {i}", _prompt(rng, families, short), _params(rng)))
    filling, long = [], []
    for i in range(FILLING):
        prompt = [rng.randrange(3, 250) for _ in range(5 * PAGE)]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        filling += _entry(decoder, Submit(f"filling {i}", prompt, params))
    for i in range(LONG):
        own = [rng.randrange(3, 250) for _ in range(rng.choice((1, 5, 40, 200)))]
        prompt = [*families[i % 2], *own] if i % 3 else [*own, *families[2]]
        long += _entry(decoder, Submit(f"long {i}", prompt, _params(rng)))
    return Catalogue(short, filling, long)


def _entry(decoder: Decoder, submit: Submit) -> list[Entry]:
    """The request with its answer; nothing if that is in doubt."""
    answer = alone(decoder, submit)
    disturbed = alone(Noisy(decoder, seed=0), submit)
    return [Entry(submit, answer)] if disturbed.tokens == answer.tokens else []


def _prompt(
    rng: random.Random, families: Sequence[Sequence[int]], earlier: Sequence[Entry]
) -> list[int]:
    """One that shares its beginning with others, or is an earlier one's next turn."""
    own = [rng.randrange(3, 250) for _ in range(rng.choice((1, 2, 5, 9, 17, 40)))]
    if earlier and rng.random() < 0.3:
        entry = rng.choice(earlier)
        return [*entry.submit.prompt, *entry.answer.tokens, *own][:100]
    return [*rng.choice(families)[: rng.choice((0, 16, 32, 40, FAMILY_TOKENS))], *own]


def _params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.5
    adjusting: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.5, 1.5)),
        "presence_penalty": rng.choice((-2.0, 2.0)),
        "frequency_penalty": rng.choice((-2.0, 1.0)),
        "logit_bias": {token: rng.choice((-20.0, 5.0)) for token in rng.sample(range(250), 20)},
    }
    return SamplingParams(
        temperature=0.0 if greedy else 1.0,
        seed=0 if greedy else rng.randrange(2**40),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        max_tokens=rng.choice((1, 2, 6, 14, 24, 30)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(3, 250), 2)),
        logprobs=rng.choice((None, None, None, 0)),
        prompt_logprobs=rng.choice((*[None] * 8, 0)),
        **{name: value for name, value in adjusting.items() if rng.random() < 0.1},
    )


def alone(decoder: Decoder, submit: Submit) -> Answer:
    """The answer to a request that has the whole model to itself."""
    prompt, params, answer = tuple(submit.prompt), submit.params, Answer()
    limit = min(len(prompt) + (params.max_tokens or POSITIONS), POSITIONS)
    pages = tuple(range(-(-limit // PAGE)))
    runner = Runner(decoder, KVCache(decoder.spec, len(pages), PAGE, decoder.dtype), 1)
    sampling = Sampling(params, params.seed or 0, len(prompt), EOS, pack(prompt))
    top = params.prompt_logprobs
    scoring = None if top is None or len(prompt) == 1 else Scoring(pack(prompt[1:]), top)
    row, chunk = PromptRow(0, 0, len(prompt), samples=True), PromptChunk(pack(prompt), scoring)
    slots = (SlotUpdate(0, 0, pages, sampling),)
    with torch.inference_mode():
        prefill = PrefillWork(0, (row,), 0, decoder.spec.layers, True, (chunk,), slots)
        _take(answer, runner, prefill)
        while len(prompt) + len(answer.tokens) < limit and not stops(answer.tokens[-1], params):
            position = len(prompt) + len(answer.tokens) - 1
            _take(answer, runner, DecodeWork((DecodeRow(0, position, 1),), 1))
    return answer


def _take(answer: Answer, runner: Runner, work: PrefillWork | DecodeWork) -> None:
    for step in runner.run(work):
        for _, scores in step.prompt_logprobs:
            answer.prompt_logprobs += [each.logprob for each in scores]
        for sampled in step.sampled:
            answer.tokens.append(sampled.token)
            answer.logprobs += [sampled.logprobs.logprob] if sampled.logprobs else []


def stops(token: int, params: SamplingParams) -> bool:
    """Whether the answer ends with that token."""
    return token in params.stop_token_ids or (not params.ignore_eos and token in EOS)


assert VOCAB == 256, "tokens are drawn below 250"
