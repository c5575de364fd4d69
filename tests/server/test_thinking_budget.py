"""`thinking_token_budget` of a model that thinks, over HTTP and in `LLM`."""

import openai
import pytest

from twolane import LLM, SamplingParams

from .parrot import Learnt, write_parrot
from .serving import serving

ROME, OSLO = "Where is the Colosseum?", "Where is the fjord?"
THOUGHTS = ("One. ", "Two. ", "Three. ", "Four. ")
LEARNT = (
    Learnt(ROME, ("<think>", *THOUGHTS, "</think>", "Rome.")),
    Learnt(OSLO, ("It is Oslo", ", is it not?")),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_parrot(tmp_path_factory.mktemp("thinker"), LEARNT)


@pytest.fixture(scope="module")
def client(path):
    with serving(str(path), "--kv-tokens", "20000", "--served-model-name", "thinker") as served:
        yield openai.OpenAI(base_url=f"{served.base}/v1", api_key="x", max_retries=0)


def asked(client, budget, said=ROME, **fields):
    more = {} if budget is None else {"thinking_token_budget": budget}
    message = {"role": "user", "content": said}
    return client.chat.completions.create(
        model="thinker",
        messages=[message],
        temperature=0,
        max_tokens=20,
        extra_body={**more, **fields.pop("extra", {})},
        **fields,
    )


@pytest.mark.parametrize("budget", [None, -1, 0, 1, 2, 3, 4, 5])
def test_thinking_has_as_many_tokens_as_its_budget(client, budget):
    """The answer follows; thinking that ends before is not touched."""
    answer = asked(client, budget).choices[0].message
    kept = 4 if budget in (None, -1) else budget
    thought = "".join(THOUGHTS[:kept]).strip()
    assert (getattr(answer, "reasoning_content", None) or "", answer.content) == (thought, "Rome.")
    ids = asked(client, budget, extra={"return_token_ids": True}).choices[0].token_ids
    assert len(ids) == 1 + min(kept, 4) + 1 + 1 + 1  # marks, thoughts, the answer, its end


def test_who_does_not_think_is_not_stopped(client):
    assert asked(client, 0, OSLO).choices[0].message.content == "It is Oslo, is it not?"


def test_several_answers_and_a_stream_have_budgets_of_their_own(client):
    both = asked(client, 2, n=2).choices
    assert [choice.message.content for choice in both] == ["Rome."] * 2
    deltas = [chunk.choices[0].delta for chunk in asked(client, 1, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Rome."
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "One."


def test_a_prompt_may_begin_the_thinking(client):
    """The tokens of thinking in it count, as in vLLM."""

    def text(prompt, budget):
        answer = client.completions.create(
            model="thinker",
            prompt=prompt,
            max_tokens=20,
            temperature=0,
            extra_body={"thinking_token_budget": budget, "skip_special_tokens": False},
        )
        return answer.choices[0].text

    assert text("<think>One. ", 3) == "Two. Three. </think>Rome."
    assert text("<think>One. Two. ", 2) == "</think>Rome."
    assert text("<think>One. Two. ", 1) == "</think>Rome."
    assert text("<think>One. </think>", 0) == "Rome."


def test_what_cannot_go_with_a_budget_is_refused_by_name(client):
    wrong = (
        {"response_format": {"type": "json_object"}},
        {"extra": {"allowed_token_ids": [5, 6]}},
        {"extra": {"bad_words": ["</think>"]}},
    )
    for fields in wrong:
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            asked(client, 1, **fields)


@pytest.mark.full
def test_an_llm_takes_it_as_a_sampling_parameter(path):
    message = [{"role": "user", "content": ROME}]
    with LLM(str(path), kv_tokens=20000) as llm:
        budgets = [None, 0, 2]
        params = [SamplingParams(temperature=0, thinking_token_budget=each) for each in budgets]
        texts = [answer.text for answer in llm.chat([message] * 3, params)]
    whole = "".join(THOUGHTS)
    assert texts == [
        f"<think>{whole}</think>Rome.",
        "<think></think>Rome.",
        "<think>One. Two. </think>Rome.",
    ]
