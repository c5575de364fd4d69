"""What an answer's tokens go through between the engine and whoever sends them."""

import asyncio
import random
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twolane.engine.messages import Output, Refused, TokenRules
from twolane.frontend.answer_formats import AnswerFormat
from twolane.frontend.generate_request import GenerateRequest
from twolane.frontend.generation import Generation, GenerationRefused
from twolane.frontend.parsers.harmony import THINKING
from twolane.frontend.parsers.reasoning import AnswerGate, ThinkingMarks
from twolane.frontend.prepare import Prepared, Prompt
from twolane.frontend.structured.jobs import GrammarJob, Regex
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.output_reader import TextOptions
from twolane.sampling import SamplingParams

PARAMS = SamplingParams()


def prepared(*prompts, n=1, params=PARAMS):
    """A request of tokens alone, as `Preparer.prepare` makes it."""
    return Prepared(
        request=GenerateRequest(prompts=prompts, sampling=params, n=n),
        prompts=[Prompt(tokens) for tokens in prompts],
        params=params,
        format=AnswerFormat(),
        text=TextOptions(),
        rules=TokenRules(),
    )


class Engine:
    """Says what it is told to say."""

    ready = SimpleNamespace(eos_token_ids=())
    aborted = False

    def __init__(self):
        self.submits = []

    def submit(self, request, sink):
        self.submits.append(request)
        self.say = lambda tokens, finish=None: sink(Output(request.id, tokens, finish))
        self.refuse = lambda message, field: sink(Refused(request.id, "invalid", message, field))

    def abort(self, id):
        self.aborted = True


class Observer:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def tokens(self, index, count, now, cached, due):
        self.told.append(count)

    def ended(self, index, event, now):
        self.told.append(event.finish)


@pytest.mark.parametrize("seed", range(20))
def test_deltas_are_taken_or_iterated_over_once_and_in_order(seed):
    """However slow the iteration is, and whenever the sink has no time."""
    draw, sent, taken, observer = random.Random(seed), [], [], Observer()

    async def pause(most):
        for _ in range(draw.randrange(most)):
            await asyncio.sleep(0)

    def take(delta):
        if draw.random() < 0.3:
            return False
        sent.extend(delta.tokens)
        taken.extend(delta.tokens)
        return True

    async def iterate(generation):
        async for delta in generation:
            await pause(4)
            sent.extend(delta.tokens)

    async def run():
        engine = Engine()
        with Generation(engine, TextCodec(None), prepared([5]), observer) as generation:
            generation.offer(take)
            sending = asyncio.create_task(iterate(generation))
            for token in range(300):
                await pause(6)
                engine.say([token], "length" if token == 299 else None)
            await sending
            assert not engine.aborted

    asyncio.run(run())
    assert sent == list(range(300))
    assert 50 < len(taken) < 250
    assert 299 not in taken
    assert observer.told == [1] * 300 + ["length"]


def test_an_error_of_the_sink_ends_the_iteration_alone():
    """Not whoever brings the tokens, for they bring those of all others, too."""

    def take(delta):
        raise ValueError("cannot be written")

    async def run():
        engine = Engine()
        with Generation(engine, TextCodec(None), prepared([5])) as generation:
            generation.offer(take)
            first = asyncio.ensure_future(anext(aiter(generation)))
            await asyncio.sleep(0)
            engine.say([7])
            with pytest.raises(ValueError, match="cannot be written"):
                await first
        assert engine.aborted

    asyncio.run(run())


def test_a_grammar_that_fails_on_the_way_is_told_by_the_name_of_the_clients_field():
    async def run():
        job = GrammarJob("response_format", Regex("a"))
        request = msgspec.structs.replace(prepared([5]), format=AnswerFormat(job))
        engine = Engine()
        with Generation(engine, TextCodec(None), request) as generation:
            engine.refuse("grammar is hard", "grammar")
            with pytest.raises(GenerationRefused, match=r"^response_format is hard$") as told:
                await anext(aiter(generation))
            assert told.value.param == "response_format"

    asyncio.run(run())


def test_answers_to_a_prompt_follow_the_first_of_them_and_have_seeds_of_their_own():
    engine = Engine()
    params = SamplingParams(seed=1, prompt_logprobs=0)

    async def run():
        Generation(engine, TextCodec(None), prepared([5], [6], n=3, params=params)).close()
        free = prepared([7], n=2, params=SamplingParams(seed=None))
        Generation(engine, TextCodec(None), free).close()

    asyncio.run(run())
    first, _, _, second, _, _, third, _ = ids = [submit.id for submit in engine.submits]
    leaders = [submit.leader for submit in engine.submits]
    assert leaders == [None, first, first, None, second, second, None, third]
    assert len(set(ids)) == 8
    assert [submit.prompt for submit in engine.submits] == [[5]] * 3 + [[6]] * 3 + [[7]] * 2
    chosen = [submit.params for submit in engine.submits]
    assert [each.seed for each in chosen] == [1, 2, 3, 1, 2, 3, None, None]
    assert [each.prompt_logprobs for each in chosen] == [0, None, None, 0, *[None] * 4]


@given(
    st.lists(st.sampled_from(["a", "b", "<think>", "</think>", "\n", "<th", "</"]), max_size=6),
    st.booleans(),
    st.lists(st.integers(0, 40)),
)
def test_the_answer_begins_where_the_thinking_ends_however_the_text_is_cut(parts, opened, cuts):
    text = "".join(parts)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    gate, thought, answer = AnswerGate(ThinkingMarks(opened=opened)), "", ""
    for start, end in pairwise(places):
        more, said = gate.feed(text[start:end])
        assert not (answer and more)
        thought, answer = thought + more, answer + said
    answer += gate.release()
    thinks = opened or text.lstrip().startswith("<think>")
    end = text.find("</think>") if thinks else -len("</think>")
    behind = len(text) if end == -1 else end + len("</think>")
    if thinks:  # the white space behind it is of neither
        behind = len(text) - len(text[behind:].lstrip())
    assert (thought, answer) == (text[:behind], text[behind:])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_header_of_an_answer_without_thinking_is_none_of_its_text(size):
    """Stop strings such as `final` would end it before it has begun."""
    head, said = "<|channel|>final<|message|>", "The final <|channel|>"
    gate = AnswerGate(THINKING)
    parts = [gate.feed((head + said)[i : i + size]) for i in range(0, len(head + said), size)]
    assert ["".join(each) for each in zip(*parts, strict=True)] == [head, said]
    assert AnswerGate(THINKING).feed("final")[1] == "final"
