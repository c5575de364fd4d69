"""The table of request fields in docs/guides/api.md, walked against a running server."""

import math
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from twolane.server.openai.protocol import WITHOUT_EFFECT, ChatRequest, CompletionRequest

from .conftest import MODEL
from .serving import wait_for

PAGE = Path(__file__).parents[2] / "docs/guides/api.md"
STATUS = "(honoured|no effect|refused|-)"
ROW = re.compile(rf"^\| `(\w+)` \| {STATUS} \| {STATUS} \|")
ROWS = [match.groups() for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]
TABLE = {
    "chat": {name: status for name, status, _ in ROWS if status != "-"},
    "completions": {name: status for name, _, status in ROWS if status != "-"},
}
LENGTH = 5
BODIES = {"chat": ChatRequest, "completions": CompletionRequest}


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_table_is_what_the_code_does(endpoint):
    body, rows = BODIES[endpoint], TABLE[endpoint]
    said = {s: {n for n, status in rows.items() if status == s} for s in set(rows.values())}
    assert said["honoured"] == set(body.model_fields)
    assert said["no effect"] == WITHOUT_EFFECT
    assert said["refused"] == set(body.unsupported)


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        ("chat", chat_create_params.CompletionCreateParamsBase),
        ("completions", completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_the_table_has_every_field_of_the_openai_client(endpoint, params):
    assert set(params.__annotations__) | {"stream"} <= set(TABLE[endpoint])


class Asker:
    """Asks one endpoint of a running server for short greedy answers."""

    def __init__(self, served, endpoint):
        self.served = served
        self._chat = endpoint == "chat"
        self._client = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
        self.question = "Count: one, two, three,"

    def base(self):
        same = {"model": MODEL, "temperature": 0, "max_tokens": LENGTH}
        if self._chat:
            return {**same, "messages": [{"role": "user", "content": self.question}]}
        return {**same, "prompt": self.question}

    def raw(self, **fields):
        """Ask; what the client's method has no parameter for goes into the extra body."""
        api = self._client.chat.completions if self._chat else self._client.completions
        known = set(api.create.__wrapped__.__code__.co_varnames) - {"user"}
        body = {k: v for k, v in {**self.base(), **fields}.items() if v is not ...}
        extra = {k: body.pop(k) for k in list(body) if k not in known}
        if self._chat:
            body.setdefault("messages", self.base()["messages"])
        else:
            body.setdefault("prompt", self.question)
        return api.create(**body, extra_body=extra)

    def text(self, **fields):
        return self.texts(**fields)[0]

    def texts(self, **fields):
        return [self.text_of(choice) for choice in self.raw(**fields).choices]

    def text_of(self, choice):
        return choice.message.content if self._chat else choice.text

    def choice(self, **fields):
        return self.raw(return_token_ids=True, **fields).choices[0]


def tokens(ask, **fields):
    return ask.choice(**fields).token_ids


# What is seen of each honoured field. Each returns whether the effect is there.


def sees_model(ask):
    with pytest.raises(openai.NotFoundError):
        ask.raw(model="other")
    return ask.raw().model == MODEL


def sees_max_tokens(ask):
    return len(tokens(ask, max_tokens=3, ignore_eos=True)) == 3


def sees_max_completion_tokens(ask):
    return len(tokens(ask, max_tokens=..., max_completion_tokens=3, ignore_eos=True)) == 3


def first_token(ask):
    return tokens(ask)[0]


def sees_min_tokens(ask):
    first = first_token(ask)
    stopped = tokens(ask, stop_token_ids=[first])
    return len(stopped) == 1 and len(tokens(ask, stop_token_ids=[first], min_tokens=4)) >= 4


def sees_n(ask):
    choices = ask.raw(n=3, temperature=1.5, seed=5, return_token_ids=True).choices
    alone = ask.choice(temperature=1.5, seed=6).token_ids
    return (
        [c.index for c in choices] == [0, 1, 2]
        and len({tuple(c.token_ids) for c in choices}) == 3
        and choices[1].token_ids == alone
    )


def sees_best_of(ask):
    with pytest.raises(openai.BadRequestError, match="best_of"):
        ask.raw(best_of=2)
    return len(ask.raw(n=2, best_of=2).choices) == 2


def sees_temperature(ask):
    return len({ask.text(temperature=2.0, seed=seed) for seed in range(4)}) > 1


def narrows(ask, **field):
    """Whether sampling hot with `field` is greedy."""
    plain = ask.text()
    return all(ask.text(temperature=2.0, seed=s, **field) == plain for s in range(2))


def sees_repetition_penalty(ask):
    ask.question = "a a a a a a a a a a a a"
    return ask.text(repetition_penalty=5.0, max_tokens=8) != ask.text(max_tokens=8)


def repeats(ask, **field):
    """How often the most frequent token comes in an answer that tends to repeat itself."""
    ask.question = "Yes. No. Yes."
    chosen = tokens(ask, max_tokens=16, ignore_eos=True, **field)
    return max(map(chosen.count, chosen))


def sees_logit_bias(ask):
    first = first_token(ask)
    return tokens(ask, logit_bias={str(first): -100})[0] != first and set(
        tokens(ask, logit_bias={"504": 100}, ignore_eos=True)
    ) == {504}


def sees_seed(ask):
    once, again, other = (ask.text(temperature=1.5, seed=seed) for seed in (7, 7, 8))
    return once == again != other


def sees_stop(ask):
    whole = ask.text()
    stop = whole[2:5]
    choice = ask.choice(stop=stop)
    return (
        ask.text_of(choice) == whole[: whole.index(stop)]
        and (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        and ask.text(stop=["never there", stop]) == ask.text_of(choice)
    )


def sees_stop_token_ids(ask):
    first = first_token(ask)
    choice = ask.choice(stop_token_ids=[first])
    return (choice.token_ids, choice.stop_reason, ask.text_of(choice)) == ([first], first, "")


def sees_allowed_token_ids(ask):
    eos = 2
    two = [id for id in range(1000, 1003) if id != first_token(ask)][:2]
    answer = tokens(ask, allowed_token_ids=two)
    single = tokens(ask, allowed_token_ids=two[:1], logit_bias={str(eos): 100})
    ends = tokens(ask, allowed_token_ids=[*two, eos], logit_bias={str(eos): 100})
    return {*answer} <= {*two} and single == two[:1] * LENGTH and ends == [eos]


def sees_bad_words(ask):
    """One of one token, and one of several, of which the tokens before the last may come."""
    whole = ask.text(max_tokens=8)
    one, *more = whole.split()
    several = " ".join(more[:2])
    without = [ask.text(max_tokens=8, bad_words=[word]) for word in (one, several)]
    begun = tokens(ask, max_tokens=8, bad_words=[several])
    for wrong in ([""], ["x" * 65], ["x"] * 129, "x"):
        with pytest.raises(openai.BadRequestError, match="bad_words"):
            ask.raw(bad_words=wrong)
    return one not in without[0] and several not in without[1] and begun[0] == first_token(ask)


def sees_thinking_token_budget(ask):
    """This model does not think: a budget is refused by name, and -1 is none."""
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget needs a model"):
        ask.raw(thinking_token_budget=3)
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        ask.raw(thinking_token_budget=-2)
    return ask.text(thinking_token_budget=-1) == ask.text()


def sees_include_stop_str_in_output(ask):
    whole = ask.text()
    return (
        ask.text(stop=whole[2:5], include_stop_str_in_output=True)
        == (whole[: whole.index(whole[2:5]) + 3])
    )


def sees_ignore_eos(ask):
    eos = {"logit_bias": {"2": 100}}
    return len(tokens(ask, **eos)) == 1 and len(tokens(ask, **eos, ignore_eos=True)) == LENGTH


def sees_skip_special_tokens(ask):
    shown = {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 2}
    return ask.text(**shown) == "" and ask.text(**shown, skip_special_tokens=False) == (
        "<|im_end|>" * 2
    )


def sees_truncate_prompt_tokens(ask):
    return ask.raw(truncate_prompt_tokens=3).usage.prompt_tokens == 3


def finite(logprob):
    return -9999 <= logprob <= 0 and math.isfinite(logprob)


def sees_prompt_logprobs(ask):
    answer = ask.raw(prompt_logprobs=2)
    shown = answer.prompt_logprobs if ask._chat else answer.choices[0].prompt_logprobs
    return (
        len(shown) == answer.usage.prompt_tokens
        and shown[0] is None
        and all(2 <= len(entry) <= 3 for entry in shown[1:])
        and all(e["rank"] >= 1 and finite(e["logprob"]) for p in shown[1:] for e in p.values())
    )


def sees_chat_logprobs(ask):
    choice = ask.choice(logprobs=True)
    entries = choice.logprobs.content
    return (
        b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
        and len(entries) == len(choice.token_ids)
        and all(finite(e.logprob) and e.top_logprobs == [] for e in entries)
    )


def sees_top_logprobs(ask):
    entries = ask.choice(logprobs=True, top_logprobs=3).logprobs.content
    return all(
        len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token for e in entries
    )  # greedy


def sees_completion_logprobs(ask):
    choice = ask.choice(logprobs=2)
    shown = choice.logprobs
    ends = [*shown.text_offset[1:], len(choice.text)]
    cut = [choice.text[a:b] for a, b in zip(shown.text_offset, ends, strict=True)]
    return (
        cut == shown.tokens
        and len(shown.tokens) == len(choice.token_ids)
        and all(finite(logprob) for logprob in shown.token_logprobs)
        and all(len(top) == 2 for top in shown.top_logprobs)
        and [max(top.values()) for top in shown.top_logprobs] == shown.token_logprobs  # greedy
    )


def sees_echo(ask):
    with_it, without = ask.choice(echo=True, logprobs=1), ask.choice()
    only = ask.raw(echo=True, logprobs=1, max_tokens=0)
    shown = only.choices[0].logprobs
    return (
        with_it.text == ask.question + without.text
        and with_it.logprobs.text_offset[-1] < len(with_it.text)
        and only.choices[0].text == ask.question == "".join(shown.tokens)
        and only.usage.completion_tokens == 0
        and shown.token_logprobs[0] is None
        and len(shown.tokens) == only.usage.prompt_tokens
    )


def sees_return_token_ids(ask):
    answer = ask.raw(return_token_ids=True)
    where = answer if ask._chat else answer.choices[0]
    return len(where.prompt_token_ids) == answer.usage.prompt_tokens


def sees_return_tokens_as_token_ids(ask):
    asked = {"logprobs": True} if ask._chat else {"logprobs": 0}
    choice = ask.choice(**asked, return_tokens_as_token_ids=True)
    shown = choice.logprobs
    names = [e.token for e in shown.content] if ask._chat else shown.tokens
    return names == [f"token_id:{token}" for token in choice.token_ids]


def sees_stream(ask):
    chunks = list(ask.raw(stream=True))
    pieces = [c.choices[0].delta.content if ask._chat else c.choices[0].text for c in chunks]
    return chunks[-1].choices[0].finish_reason == "length" and "".join(pieces) == ask.text()


def sees_stream_options(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask.raw(stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    return (
        last.choices == []
        and last.usage.completion_tokens == counts[-1] == LENGTH
        and counts == sorted(counts)
        and all(c.usage is None for c in ask.raw(stream=True, stream_options={}))
    )


def sees_messages(ask):
    turns = ask.base()["messages"]
    with pytest.raises(openai.BadRequestError) as refusal:
        ask.raw(messages=[{**turns[0], "nope": "Ann"}])
    assert refusal.value.param == "messages[0].nope"
    ask.question = "What is the capital of France?"
    return "Paris" in ask.text(max_tokens=20)


def sees_prompt(ask):
    ask.question = "The capital of France is"
    return "Paris" in ask.text()


def sees_add_generation_prompt(ask):
    with_it, without = (
        ask.raw(add_generation_prompt=wanted).usage.prompt_tokens for wanted in (True, False)
    )
    return with_it > without


def sees_continue_final_message(ask):
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    return "Paris" in ask.text(messages=turns, continue_final_message=True)


# These are seen on the `textual` server.


def prompt_length(ask, **fields):
    return ask.raw(**fields).usage.prompt_tokens


def sees_add_special_tokens(ask):
    with_it, without = (prompt_length(ask, add_special_tokens=wanted) for wanted in (True, False))
    return with_it == without + 1 and prompt_length(ask) == (without if ask._chat else with_it)


def sees_chat_template_kwargs(ask):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask.raw(chat_template_kwargs={"enable_thinkign": True})
    thinking = prompt_length(ask, chat_template_kwargs={"enable_thinking": True})
    return refusal.value.param == "chat_template_kwargs" and thinking > prompt_length(ask)


def sees_priority(ask):
    """One request runs at a time; of two that wait, the later and more urgent is served first."""

    def figure(name):
        return ask.served.metrics()[name]

    long = {"ignore_eos": True, "max_tokens": 30_000, "stream": True}
    running = ask.raw(**long)
    with ThreadPoolExecutor(2) as threads, running:
        next(iter(running))
        patient = threads.submit(ask.raw, priority=1, **long)
        wait_for(lambda: figure("num_requests_waiting") == 1)
        urgent = threads.submit(ask.raw, priority=-1, ignore_eos=True)
        wait_for(lambda: figure("num_requests_waiting") == 2)
        running.close()
        urgent.result()
        still_there = figure("requests_in_flight")
        patient.result().close()
    wait_for(lambda: figure("requests_in_flight") == 0)
    return still_there == 1


def sees_cache_salt(ask):
    """A prompt is found again by who has the same salt, and by nobody else."""
    ask.question = "one, two, three, four, five, six, seven, eight, nine, ten, " * 4

    def cached(**salt):
        return ask.raw(**salt).usage.prompt_tokens_details.cached_tokens

    mine = {"cache_salt": f"chat: {ask._chat}"}
    found = [cached(), cached(), cached(**mine), cached(**mine), cached(cache_salt="other")]
    return found[1] > 0 and found[2] == 0 and found[3] > 0 and found[4] == 0


def test_answers_to_one_prompt_compute_its_full_pages_once(real):
    """With a grammar, too, whose compilation each answer waits for."""
    prompt = [[100 * place + each for each in range(40)] for place in (1, 2)]
    choice = {"choice": ["seven", "eight", "a dozen"]}
    for ids, fields in zip(prompt, ({}, {"structured_outputs": choice}), strict=True):
        before = hits(real)
        Asker(real, "completions").raw(prompt=ids, n=3, seed=1, temperature=1.0, **fields)
        assert hits(real) - before == 2 * 32


def hits(served):
    name = "twolane:prefix_cache_hits_total{"
    with urllib.request.urlopen(f"{served.base}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_only_a_limit_that_was_sent_is_refused_for_its_room():
    def limited(**fields):
        return CompletionRequest.model_validate({"prompt": "x", **fields}).request().limit_field

    assert limited() is None  # the answer ends at the context, if that comes before the default
    assert limited(max_tokens=16) == limited(truncate_prompt_tokens=-1) == "max_tokens"


def sees_prompt_token_ids(ask):
    """The tokens count, not the text beside them."""
    given = ask.raw(return_token_ids=True)
    ids = given.prompt_token_ids if ask._chat else given.choices[0].prompt_token_ids
    ask.question = "something else"
    return ask.text() != ask.text(prompt_token_ids=ids) == ask.text_of(given.choices[0])


TEXTUAL = {"add_special_tokens", "chat_template_kwargs", "priority"}


AGENTS = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
"""Served where the chat template knows them: test_agents.py has a model whose template does."""


def sees_response_format(ask):
    return ask.text(response_format={"type": "json_object"}).lstrip().startswith("{")


def sees_structured_outputs(ask):
    return ask.text(structured_outputs={"choice": ["seven", "eight"]}) in ("seven", "eight")


def constrains(name, value):
    """Whether an answer under vLLM's older fields, or SGLang's, is one of two words."""
    return lambda ask: ask.text(**{name: value}) in ("seven", "eight")


def greedily(**field):
    return lambda ask: narrows(ask, **field)


def less_often(**field):
    return lambda ask: repeats(ask, **field) < repeats(ask)


EITHER = "seven|eight"
RULE = 'root ::= "seven" | "eight"'
EFFECTS = {
    "regex": constrains("regex", EITHER),
    "ebnf": constrains("ebnf", RULE),
    "guided_regex": constrains("guided_regex", EITHER),
    "guided_choice": constrains("guided_choice", ["seven", "eight"]),
    "guided_grammar": constrains("guided_grammar", RULE),
    "guided_json": lambda ask: ask.text(guided_json={"const": 7}).strip() == "7",
    "top_p": greedily(top_p=1e-6),
    "top_k": greedily(top_k=1),
    "min_p": greedily(min_p=1.0),
    "presence_penalty": less_often(presence_penalty=2.0),
    "frequency_penalty": less_often(frequency_penalty=2.0),
}


def effect(endpoint, name):
    if name == "logprobs":
        return sees_chat_logprobs if endpoint == "chat" else sees_completion_logprobs
    return EFFECTS.get(name) or globals()[f"sees_{name}"]


@pytest.fixture(scope="module")
def plain(real):
    """endpoint → the answer without any field."""
    return cache(lambda endpoint: Asker(real, endpoint).text())


@pytest.mark.parametrize(
    ("endpoint", "name", "status"),
    [
        (endpoint, name, status)
        for endpoint, rows in TABLE.items()
        for name, status in rows.items()
        if name not in AGENTS
    ],
)
def test_the_table_is_what_the_server_does(real, textual, plain, endpoint, name, status):
    ask = Asker(textual if name in TEXTUAL else real, endpoint)
    if status == "honoured":
        assert effect(endpoint, name)(ask)
    elif status == "no effect":
        assert ask.text(**{name: {"any": "value"}}) == plain(endpoint)
    else:
        with pytest.raises(openai.BadRequestError) as refusal:
            ask.raw(**{name: {"other": "value"}})
        assert refusal.value.param == name
        assert name in str(refusal.value) or name == "chat_template"
