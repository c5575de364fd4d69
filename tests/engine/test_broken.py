"""NaN and infinity in a model's logits end the request that they are of, and no other."""

import random

import pytest
import torch
from msgspec.structs import replace

from tests.engine.stepped import stepped_engine
from tests.engine.world import EOS, MODEL_LEN, PAGE, alone, tiny_decoder
from tests.systems.names import SYSTEM_NAMES
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.messages import Output, Refused, Submit
from twolane.model.decoder import Decoder
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

POISON = 251
"""A token whose embedding holds no number."""
PAGES, SLOTS = 60, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def poisoned(value: float) -> Decoder:
    """The tiny model with one broken embedding."""
    decoder = tiny_decoder.__wrapped__()
    decoder.weights.embedding[POISON] = value
    return decoder


def run(decoder: Decoder, system: str, submits: list[Submit]) -> tuple[Engine, dict[str, list]]:
    """Serve requests in random steps; the events of each."""
    model = ServedModel(decoder.spec.vocab_size, EOS, MODEL_LEN)
    engine, lanes = stepped_engine(make_system(system), decoder, model, PAGES, PAGE, SLOTS)
    rng, events = random.Random(1), {submit.id: [] for submit in submits}
    engine.take(submits)
    with torch.inference_mode():
        for _ in range(2000):
            engine.reap()
            while engine.carry_out(engine.plan()):
                pass
            if (news := engine.outputs()) is not None:
                for event in (*news.outputs, *news.refused):
                    events[event.id].append(event)
            if lanes.runnable():
                lanes.step(rng.choice(lanes.runnable()))
            engine.state.kv.check()
    return engine, events


def tokens_of(events: list[Output | Refused]) -> list[int]:
    return [token for each in events if isinstance(each, Output) for token in each.tokens]


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_the_broken_request_ends_and_the_others_go_on(system: str) -> None:
    """One is broken in its prompt, one when it has chosen the broken token itself."""
    sound = [Submit(f"sound {i}", list(range(20 + i, 32 + i)), GREEDY) for i in range(3)]
    prompt = Submit("prompt", [9, 8, POISON, 7, 6], GREEDY)
    chosen = Submit("chosen", [9, 8, 7, 6], replace(GREEDY, logit_bias={POISON: 100.0}))
    submits = [sound[0], prompt, sound[1], chosen, sound[2]]
    engine, events = run(poisoned(torch.nan), system, submits)
    for submit in sound:
        assert tokens_of(events[submit.id]) == alone(submit).tokens
    for name, tokens in (("prompt", []), ("chosen", [POISON])):
        assert [type(each) for each in events[name]][-1] is Refused
        assert events[name][-1].code == "broken"
        assert tokens_of(events[name]) == tokens
    assert engine.stats().broken == 2
    assert engine.state.kv.free_slots == SLOTS


@pytest.mark.parametrize("more", [{"logprobs": 2}, {"prompt_logprobs": 0}, {"min_tokens": 3}])
def test_no_option_of_a_request_hides_it(more: dict[str, int]) -> None:
    params = replace(GREEDY, ignore_eos=False, **more)
    _, events = run(poisoned(torch.nan), "chunked", [Submit("a", [5, POISON, 6], params)])
    (only,) = events["a"]
    assert isinstance(only, Refused)


def test_infinity_is_as_bad() -> None:
    """In the logits themselves: attention and norms make NaN of an infinite embedding."""
    decoder = tiny_decoder.__wrapped__()
    head = decoder.head

    def infinite(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 3] = torch.inf
        return logits

    decoder.head = infinite
    engine, events = run(decoder, "static-split", [Submit("a", [5, 6], GREEDY)])
    assert isinstance(events["a"][-1], Refused)
    assert engine.stats().broken == 1
