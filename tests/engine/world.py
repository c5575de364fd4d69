"""Random schedules against the real engine and a real tiny model, checked after every turn."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.engine.stepped import SteppedLanes
from tests.model.adapters import make_adapter
from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.doubled import doubled
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.constrained.bits import no_token, with_tokens
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import (
    Abort,
    AdapterResult,
    Finish,
    LoadAdapter,
    Output,
    Submit,
    ToEngine,
    TokenRules,
    UnloadAdapter,
)
from twolane.engine.pacing import Pacer
from twolane.engine.request import Phase, Request
from twolane.engine.state import State
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.base import Step
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
    TokenMask,
    pack,
)
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.load.hub import resolve
from twolane.model.lora import AdapterPool
from twolane.model.page_layout import PageLayout
from twolane.sampling import SamplingParams, TokenLogprobs
from twolane.slo import Slo
from twolane.systems.base import System
from twolane.systems.rows import RowTable, WaitingTable

PAGE = 4
MODEL_LEN = 48
EOS = (2,)
SEVENTH = 7
"""Of every seven requests, one allows few tokens, and one has banned sequences: of the few tokens
that it allows, or what it would say otherwise."""
SLOS = (Slo(), Slo(ttft=1e4, tbt=3.0), Slo(ttft=20.0, tbt=1.0))
"""A step takes a second."""


ADAPTERS = {"small": 1, "medium": 8, "large": 64}
"""Names and ranks of adapters. Each has two versions."""


SNAPSHOTS = 4
"""Snapshots of states, fewer than requests want."""
FAMILY = "qwen2"
"""The family of a world's model, unless it says another."""
SIZES = {"olmo3": {"sliding_window": 9}}
"""Sizes that differ from those of other tests: several pages leave this window."""


@cache
def tiny_folder(family: str = FAMILY) -> TemporaryDirectory[str]:
    """A checkpoint, `model`, and adapters of the usual family, each as `NAME-VERSION`."""
    folder = TemporaryDirectory()
    path = make_checkpoint(family, Path(folder.name) / "model", seed=1, sizes=SIZES.get(family))
    if family != FAMILY:
        return folder
    for seed, (name, version) in enumerate(product(ADAPTERS, range(2))):
        to = Path(folder.name) / f"{name}-{version}"
        make_adapter(path, to, rank=ADAPTERS[name], seed=seed, strength=0.5)
    return folder


@cache
def tiny_decoder(family: str = FAMILY) -> Decoder:
    """Four layers in float64: the tokens of a request cannot depend on what runs beside it."""
    return doubled(load_decoder(resolve(f"{tiny_folder(family).name}/model")))


def make_runner(
    pages: int, slots: int, family: str = FAMILY, layout: PageLayout | None = None
) -> Runner:
    decoder = tiny_decoder(family)
    kv = KVCache(decoder.spec, pages, PAGE, torch.float64, requests=slots, layout=layout)
    for layer in (*kv.k, *kv.v, *kv.states.conv, *kv.states.rule):
        layer.fill_(1e3)  # what nobody wrote must not be read: it would show
    adapters = len(ADAPTERS) if family == FAMILY else 0
    return Runner(decoder, kv, slots, AdapterPool(decoder.weights, adapters))


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, step: Step) -> None:
        """The one row of that step."""
        for _, scores in step.prompt_logprobs:
            self.prompt_logprobs.extend(scores)
        for sampled in step.sampled:
            self.tokens.append(sampled.token)
            self.logprobs.extend([sampled.logprobs] if sampled.logprobs else [])


def alone(submit: Submit, adapter: str | None = None, family: str = FAMILY) -> Answer:
    """The answer to a request that has the whole model to itself, with the adapter of that path."""
    # The seed is handed over by itself: one cache entry serves all greedy requests of a prompt.
    params = msgspec.structs.replace(submit.params, seed=None)
    encoded = msgspec.json.encode(params)
    prompt, seed = tuple(submit.prompt), submit.params.seed or 0
    return _alone(prompt, encoded, seed, adapter, submit.rules, family)


@cache
def _alone(
    prompt: tuple[int, ...],
    encoded: bytes,
    seed: int,
    adapter: str | None,
    rules: TokenRules,
    family: str,
) -> Answer:
    params = msgspec.json.decode(encoded, type=SamplingParams)
    decoder, answer = tiny_decoder(family), Answer()
    pages = tuple(range(-(-MODEL_LEN // PAGE)))
    runner = make_runner(len(pages), 1, family)
    if adapter is not None:
        runner.load_adapter(0, adapter)
    sampling = Sampling(params, seed, len(prompt), EOS, pack(prompt))
    top = params.prompt_logprobs
    scoring = None if top is None or len(prompt) == 1 else Scoring(pack(prompt[1:]), top)
    row, chunk = PromptRow(0, 0, len(prompt), samples=True), PromptChunk(pack(prompt), scoring)
    slots = (SlotUpdate(0, 0, pages, sampling, -1 if adapter is None else 0),)
    budget = params.thinking_token_budget or 0
    thought = partial(_forced, rules.thinking, budget, prompt, answer.tokens)
    masks = partial(_masks, rules.allowed, rules.banned, answer.tokens, thought)
    layers = decoder.spec.layers
    prefill = PrefillWork(0, (row,), 0, layers, True, (chunk,), slots, masks=masks())
    limit = min(len(prompt) + (params.max_tokens or MODEL_LEN), MODEL_LEN)
    with torch.inference_mode():
        for step in runner.run(prefill):
            answer.take(step)
        while len(prompt) + len(answer.tokens) < limit and not _stops(answer.tokens[-1], params):
            position = len(prompt) + len(answer.tokens) - 1
            work = DecodeWork((DecodeRow(0, position, 1),), 1, masks=masks())
            for step in runner.run(work):
                answer.take(step)
    return answer


def _masks(
    allowed: bytes | None,
    banned: Sequence[tuple[int, ...]],
    output: Sequence[int],
    forced: Callable[[], int | None],
) -> tuple[TokenMask, ...]:
    """The mask of the token after an output, if there is any."""
    size, only = tiny_decoder().spec.vocab_size, forced()
    if only is not None:
        return (TokenMask(0, with_tokens(no_token(size), [only])),)
    if allowed is None and not banned:
        return ()
    every = range(size)
    left = {t for t in every if allowed is None or allowed[t // 8] >> t % 8 & 1}
    for *begin, last in banned:
        if (*output,)[len(output) - len(begin) :] == (*begin,):
            left.discard(last)
    return (TokenMask(0, with_tokens(no_token(size), left)),)


def _forced(
    marks: tuple[int, int] | None, budget: int, prompt: Sequence[int], output: Sequence[int]
) -> int | None:
    """The token that ends thinking whose budget is spent; None: there is none. No prompt here has
    the mark that ends it."""
    if marks is None:
        return None
    (begin, end), whole = marks, [*prompt, *output]
    if begin not in whole:
        return None
    first = len(prompt) - 1 - prompt[::-1].index(begin) if begin in prompt else whole.index(begin)
    open = end not in whole[first + 1 :]
    return end if open and len(whole) - first - 1 >= budget else None


def _stops(token: int, params: SamplingParams) -> bool:
    return token in params.stop_token_ids or (not params.ignore_eos and token in EOS)


@dataclass
class World:
    """One engine, its stepped lanes, and a script of arrivals, aborts and stop strings."""

    system: System
    rng: random.Random
    requests: int = 20
    pages: int = 14
    slots: int = 6
    prefix_cache: bool = True
    adapted: bool = False
    """Whether requests ask for adapters, which are unloaded and loaded again meanwhile."""
    family: str = FAMILY
    """One of the families of `tests.model.checkpoints`."""
    seen: Counter[str] = field(default_factory=Counter)
    """How often the schedule did what it is meant to exercise."""
    versions: dict[str, int] = field(default_factory=dict, init=False)
    """The version of each adapter that is loaded, or was last."""
    live: set[str] = field(default_factory=set, init=False)
    answers: dict[str, Any] = field(default_factory=dict, init=False)
    cut: set[str] = field(default_factory=set, init=False)
    """Requests that the API process ended, for a stop string."""
    finished: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        spec = tiny_decoder(self.family).spec
        snapshots = SNAPSHOTS if spec.state is not None else None
        layout, states = PageLayout.of(spec), self.slots + (snapshots or 0)
        self.pages *= 1 + layout.window_tables
        self.runner = make_runner(self.pages, states, self.family, layout)
        lanes = self.make_lanes(self.runner)
        books = KVCacheManager(
            self.pages,
            PAGE,
            self.slots,
            prefix_cache=self.prefix_cache,
            snapshots=snapshots,
            window=layout.window,
            window_tables=layout.window_tables,
        )
        self.lanes = lanes
        self.registry = AdapterRegistry(lanes, len(ADAPTERS))
        pacer = Pacer(buffer=1e-9)
        self.engine = Engine(
            self.system,
            State(books, lanes, spec.layers, OnlineEstimator(), pacer=pacer),
            ServedModel(spec.vocab_size, EOS, MODEL_LEN),
            adapters=self.registry,
        )
        if self.adapted:
            self.versions = dict.fromkeys(ADAPTERS, 0)
        for name in self.versions:
            self.registry.load_at_start(name, self._path(name))
        self.adapter_of: dict[str, str] = {}
        """Path of the adapter that each request has got."""
        self.submits: list[Submit] = []
        for i in range(self.requests):
            self.submits.append(self._submit(i))
        self.to_send = list(self.submits)

    def make_lanes(self, runner: Runner) -> Any:
        return SteppedLanes(runner, self._run_on)

    def _submit(self, i: int) -> Submit:
        """The first three fill the pool, the last two ask the same; the others are of all kinds,
        and may follow an earlier one as the next turn of a conversation does."""
        drawn = msgspec.structs.replace(self._drawn(i), slo=SLOS[i % len(SLOS)])
        drawn = self._masked(i, drawn)
        if not self.versions or i < 3 or i >= self.requests - 2:
            return drawn
        return msgspec.structs.replace(drawn, lora=self.rng.choice((None, *self.versions)))

    def _masked(self, i: int, drawn: Submit) -> Submit:
        """See `SEVENTH`."""
        change = msgspec.structs.replace
        if i % SEVENTH == 6:
            some = with_tokens(no_token(tiny_decoder().spec.vocab_size), range(i, 250, 6))
            return change(drawn, rules=TokenRules(allowed=some))
        if i < 3 or i >= self.requests - 2:
            return drawn
        if i % SEVENTH != 3:
            return drawn
        if i % 2 == 0:
            a, b, c, d = few = tuple(range(i, 250, 60))[:4]
            banned = ((a, b), (b, b), (d, d, a), (d, a, c, c), (c, c))
            allowed = with_tokens(no_token(tiny_decoder().spec.vocab_size), few)
            return change(drawn, rules=TokenRules(banned=banned, allowed=allowed))
        said = self._alone(change(drawn, rules=TokenRules())).tokens
        parts = (said[:1], said[1:3], said[2:5], said[8:10])
        banned = tuple(tuple(part) for part in parts if part)
        kept = {*drawn.prompt, *said, *EOS, *drawn.params.stop_token_ids}
        thinking = drawn.prompt[-1], next(token for token in range(i, 250) if token not in kept)
        params = change(drawn.params, thinking_token_budget=i % 3)
        return change(drawn, params=params, rules=TokenRules(banned=banned, thinking=thinking))

    def _alone(self, submit: Submit, adapter: str | None = None) -> Answer:
        """See `alone`."""
        return alone(submit, adapter, self.family)

    def _path(self, name: str) -> str:
        """Where the version of an adapter is that is to be loaded."""
        return f"{tiny_folder().name}/{name}-{self.versions[name]}"

    def _drawn(self, i: int) -> Submit:
        rng = self.rng
        if i == self.requests - 1:
            return msgspec.structs.replace(self.submits[-1], id=f"r{i}")
        if i < 3 or i == self.requests - 2:
            prompt = [rng.randrange(3, 250) for _ in range(14)]
            return Submit(
                f"r{i}", prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            )
        if rng.random() < 0.15:
            return self._sibling(f"r{i}")
        greedy = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0,
            seed=None if greedy else rng.randrange(2**40),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.9)),
            max_tokens=rng.choice((1, 2, 6, 14, 24, 30)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(3, 250), 6)),
            logprobs=rng.choice((None, None, None, 0, 3)),
            prompt_logprobs=rng.choice((*[None] * 8, 0, 2)),
            **self._adjusting(),
        )
        priority, key = rng.choice((0, 0, 0, 1)), (None, 0, 1)[i % 3]
        return Submit(f"r{i}", self._prompt(), params, priority=priority, key=key)

    def _adjusting(self) -> dict[str, Any]:
        """Bias and penalties for some, strong enough to change what a random model says."""
        rng = self.rng
        kinds = {
            "repetition_penalty": rng.choice((0.5, 1.5, 4.0)),
            "presence_penalty": rng.choice((-2.0, 2.0)),
            "frequency_penalty": rng.choice((-2.0, 1.0)),
            "logit_bias": {token: rng.choice((-20.0, 5.0)) for token in rng.sample(range(250), 20)},
        }
        return {name: value for name, value in kinds.items() if rng.random() < 0.15}

    def _sibling(self, name: str) -> Submit:
        """Another answer to the same prompt (`n` > 1)."""
        last = self.submits[-1]
        params = msgspec.structs.replace(
            last.params, temperature=1.0, seed=self.rng.randrange(2**40), prompt_logprobs=None
        )
        leader = last.leader or last.id
        return msgspec.structs.replace(last, id=name, params=params, leader=leader)

    def _prompt(self) -> list[int]:
        """One that shares its beginning with others, all of it, or follows an earlier request."""
        rng = self.rng
        if self.submits and rng.random() < 0.4:
            earlier = rng.choice(self.submits)
            text = earlier.prompt + self._alone(earlier).tokens
            if rng.random() < 0.5:
                return text[: rng.randint(20, 36)]
            return [*text[:36], *(rng.randrange(3, 250) for _ in range(rng.randint(1, 5)))]
        family = random.Random(rng.randrange(3))
        shared = [family.randrange(3, 250) for _ in range(16)][: rng.choice((0, 4, 8, 12, 16))]
        own = [rng.randrange(3, 250) for _ in range(rng.choice((1, 2, 5, 9, 14)))]
        return shared if len(shared) == 16 and rng.random() < 0.5 else shared + own

    def run(self) -> None:
        """Until every request has ended; everything is checked after every turn."""
        idle = 0
        with torch.inference_mode():
            while self.to_send or self.live:
                self.turn(self._messages())
                ran = self.run_lanes()
                idle = 0 if ran else idle + 1
                assert idle < 300, "nothing happens any more"
            self.drain()
        self._check_end()

    def turn(self, messages: Sequence[ToEngine]) -> bool:
        """One turn of the loop, with what happened noted and the books checked."""
        engine = self.engine
        self._note_reuse()
        changed = engine.take(messages)
        changed |= engine.reap()
        self.seen["held first tokens"] += len(engine.state.pacer.held)
        plan = engine.plan()
        self.seen["preempted batches"] += plan.preempt
        changed |= engine.carry_out(plan)
        for launch in plan.launches:
            self.seen[f"level {launch.lane} {launch.units}"] += 1
        news = engine.outputs()
        if news is not None:
            assert not news.refused, news.refused
            self._note_adapters(news.adapters)
            for output in news.outputs:
                assert output.id not in self.finished, "news of a request that has ended"
                self._note_output(output)
                if output.finish is not None:
                    self.finished[output.id] = output.finish
                    self.live.remove(output.id)
        self.check()
        return changed

    def _note_adapters(self, adapters: Sequence[AdapterResult]) -> None:
        """Load another version under the name of an adapter that has been unloaded."""
        for told in adapters:
            assert told.problem is None
            if told.loaded:
                continue
            users = [r for r in self.engine.state.requests.values() if r.adapter >= 0]
            self.seen["reloads beside others"] += bool(users)
            self.versions[told.name] ^= 1
            self.engine.take([LoadAdapter(told.name, self._path(told.name))])
            self.registry._loading[told.name][1].result()

    def _note_output(self, output: Output) -> None:
        answer = self.answers.setdefault(output.id, Answer())
        if output.prompt_logprobs is not None:
            assert output.tokens
            assert not answer.tokens, "prompt log-probabilities come with the first tokens"
        answer.tokens.extend(output.tokens)
        answer.logprobs.extend(output.logprobs or ())
        answer.prompt_logprobs.extend(output.prompt_logprobs or ())

    def check(self) -> None:
        """What must hold between any two turns."""
        state = self.engine.state
        state.kv.check()
        _check_columns(state)
        for request in state.requests.values():
            _check_left(request)
        for request in state.pacer.held:
            told = self.answers.get(request.id)
            assert told is None or not told.tokens
        for request in state.requests.values():
            held = request.allocation
            held_back = request in state.queue.held.get(request.leader or "", ())
            lines = (request in state.queue.new) + (request in state.queue.started) + held_back
            assert lines == (request.phase is Phase.WAITING)
            assert (request in state.decoding) == (request.phase is Phase.DECODE)
            assert held is None or not held.given_up
            if request.phase is Phase.DECODE:
                assert held is not None
                assert len(held.pages) * state.kv.page_size >= request.context
            if held_back:
                leader = state.requests[request.leader]
                assert not leader.generated
                self.seen["held back"] += 1

    def _messages(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while self.to_send and self.rng.random() < 0.25:
            if len(self.to_send) <= 2 and self.live:
                break  # the last two come one after the other
            name = self.to_send[0].lora
            if name is not None and self.registry.find(name) is None:
                break  # it is being loaded again
            submit = self.to_send.pop(0)
            if name is not None:
                self.adapter_of[submit.id] = self._path(name)
            self.live.add(submit.id)
            messages.append(submit)
        loaded = [name for name in self.versions if self.registry.find(name)]
        if loaded and self.rng.random() < 0.05:
            name = self.rng.choice(loaded)
            sent = [m.lora for m in messages if isinstance(m, Submit)]
            slot = self.registry.find(name).slot
            users = [r for r in self.engine.state.requests.values() if r.adapter == slot]
            self.seen["unloads in use"] += bool(users) or name in sent
            messages.append(UnloadAdapter(name))
        victim = self._victim()
        if victim is not None:
            self.seen[f"aborted in {victim.phase.value}"] += 1
            self.seen["aborted in flight"] += _in_flight(victim)
            messages.append(Abort(victim.id))
        stopped = self._stopped()
        if stopped is not None and stopped is not victim:
            self.seen["stopped in flight"] += _in_flight(stopped)
            self.cut.add(stopped.id)
            messages.append(Finish(stopped.id, self.rng.randint(0, stopped.generated)))
        return messages

    def _mortal(self) -> list[Request]:
        """Those that may be ended from outside: not the last two, which ask the same, nor the
        first three, while they are to fill the pool."""
        immortal = {submit.id for submit in self.submits[-2:]}
        if not self.seen["memory preemptions"]:
            immortal |= {submit.id for submit in self.submits[:3]}
        requests = sorted(self.engine.state.requests.values(), key=lambda r: r.order)
        return [request for request in requests if request.id not in immortal]

    def _stopped(self) -> Request | None:
        """In whose output the API process finds a stop string."""
        found = [r for r in self._mortal() if r.generated]
        return self.rng.choice(found) if found and self.rng.random() < 0.04 else None

    def _victim(self) -> Request | None:
        """Whom to abort: now and then anybody; in every schedule somebody in flight."""
        requests = self._mortal()
        in_flight = [r for r in requests if _in_flight(r)]
        if in_flight and not self.seen["aborted in flight"] and len(self.finished) > 4:
            return self.rng.choice(in_flight)
        return self.rng.choice(requests) if requests and self.rng.random() < 0.05 else None

    def run_lanes(self) -> bool:
        """Let lanes run for a while, or hold one back while the other goes on."""
        steps = self.rng.choice((0, 1, 1, 2, 4))
        held_back = self.rng.choice((None, None, "prefill", "decode"))
        ran = False
        for _ in range(steps):
            lanes = [lane for lane in self.lanes.runnable() if lane != held_back]
            if lanes:
                self.lanes.step(self.rng.choice(lanes))
                ran = True
        return ran

    def _run_on(self) -> None:
        if self.rng.random() < 0.1:
            for _ in range(self.rng.randint(1, 8)):
                if runnable := self.lanes.runnable():
                    self.lanes.step(self.rng.choice(runnable))

    def _note_reuse(self) -> None:
        state = self.engine.state
        self.seen["prefix hits"] = state.counters.prefix_hits
        self.seen["memory preemptions"] = state.counters.preemptions

    def drain(self) -> None:
        """Let what is still in flight land."""
        while self.lanes.runnable():
            self.lanes.step(self.rng.choice(self.lanes.runnable()))
            self.turn([])
        self.turn([])
        assert not self.runner._paused, "hidden states were kept"

    def _check_end(self) -> None:
        kv = self.engine.state.kv
        assert kv.free_pages + kv.reclaimable_pages == self.pages, "pages did not come back"
        assert kv.free_slots == self.slots, "slots did not come back"
        assert set(self.finished) == {submit.id for submit in self.submits}
        for submit in self.submits:
            self._check_output(submit)

    def _check_output(self, submit: Submit) -> None:
        got = self.answers.get(submit.id, Answer())
        want = self._alone(submit, self.adapter_of.get(submit.id))
        n = len(want.tokens)
        if self.finished[submit.id] == "abort" or submit.id in self.cut:
            n = len(got.tokens)
        assert got.tokens == want.tokens[:n], f"{submit.id}: {got.tokens} is not {want.tokens}"
        if submit.params.logprobs is not None:
            _compare(got.logprobs, want.logprobs[:n])
        if submit.params.prompt_logprobs is not None and n:
            _compare(got.prompt_logprobs, want.prompt_logprobs)
        if submit.id in self.cut:
            assert self.finished[submit.id] == "stop"
        self._note_kind(submit)

    def _note_kind(self, submit: Submit) -> None:
        params = submit.params
        self.seen["penalised"] += params.penalises
        self.seen["banned"] += len(submit.rules.banned) > 1
        self.seen["thinking"] += submit.rules.thinking is not None
        self.seen["biased"] += bool(params.logit_bias)
        self.seen["scored"] += params.logprobs is not None
        self.seen["scored prompts"] += params.prompt_logprobs is not None


def _check_columns(state: State) -> None:
    """What systems see in columns is what they would see in the requests."""
    table = state.rows.table()
    assert list(table.requests) == [each for each in state.decoding if each.decodes]
    fresh = RowTable.of(table.requests)
    for name in ("context", "bound", "tbt", "slack", "last"):
        kept, right = (getattr(each, f"{name}_column")[each.at] for each in (table, fresh))
        assert np.array_equal(kept, right, equal_nan=name != "context"), name
    kept, right = state.queue.table(), WaitingTable.of(state.queue.visible)
    order, expected = (
        [each.requests[i] for i in each.by_deadline.tolist()] for each in (kept, right)
    )
    assert order == expected
    for name in ("priority", "arrival", "deadline", "new", "reused", "yields", "wanted"):
        ours, theirs = (getattr(each, name)[each.by_deadline] for each in (kept, right))
        assert np.array_equal(ours, theirs, equal_nan=name == "deadline"), name


def _check_left(request: Request) -> None:
    """A request is launched for as many tokens as it may still get, and no more."""
    computed = request.phase is Phase.DECODE or request.context >= len(request.tokens)
    known = request.context + 1 if computed else len(request.tokens)
    assert known + request.to_generate == request.limit, request


def _compare(got: list[TokenLogprobs], want: list[TokenLogprobs]) -> None:
    """The same tokens in the same order; the model is in float64, its logits in float32."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        other = f"{ours} is not {theirs}"
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank), other
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top], other
        values = [ours.logprob, *(logprob for _, logprob in ours.top)]
        close = pytest.approx([theirs.logprob, *(p for _, p in theirs.top)], abs=1e-4)
        assert values == close, other


def _in_flight(request: Request) -> bool:
    return request.allocation is not None and request.allocation.in_flight > 0
