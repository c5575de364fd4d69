"""What the `openai` client can do beside fields, and what holds across its ways of asking."""

import asyncio

import openai
import pytest

from .conftest import MODEL
from .serving import wait_for

QUESTION = [{"role": "user", "content": "Count from one to twenty in words."}]
CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
TEXT = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def client(real):
    return openai.OpenAI(base_url=f"{real.base}/v1", api_key="none", max_retries=0)


def test_raw_responses_have_their_headers(client):
    raw = client.chat.completions.with_raw_response.create(
        **CHAT, extra_headers={"X-Request-Id": "mine-1", "x-slo-ttft-ms": "1000"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    answer = raw.parse()
    assert answer._request_id == "mine-1"
    assert answer.choices[0].message.content


def test_streamed_responses(client):
    with client.completions.with_streaming_response.create(**TEXT, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"


def test_the_async_client_asks_side_by_side(real, client):
    async def ask(api, number):
        stream = await api.completions.create(
            **{**TEXT, "prompt": f"{number} and"},
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 16
        return "".join(chunk.choices[0].text for chunk in chunks[:-1])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{real.base}/v1", api_key="none") as api:
            return await asyncio.gather(*(ask(api, number) for number in range(8)))

    texts = asyncio.run(ask_all())
    alone = client.completions.create(**{**TEXT, "prompt": "5 and"})
    assert texts[5] == alone.choices[0].text


def wait_until_quiet(real):
    """Until nothing is left of what clients of other tests have given up, either."""
    for name in ("requests_in_flight", "num_requests_running"):
        wait_for(lambda name=name: real.metrics()[name] == 0)


def test_a_timeout_of_the_client_aborts_the_request(real, client):
    wait_until_quiet(real)
    aborted = real.metrics().get("requests_aborted_total", 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            **{**TEXT, "max_tokens": 4000}, extra_body={"ignore_eos": True}
        )
    wait_for(lambda: real.metrics().get("requests_aborted_total", 0) == aborted + 1)
    wait_until_quiet(real)


def test_a_client_that_leaves_several_choices_frees_all_of_them(real, client):
    stream = client.completions.create(
        **{**TEXT, "max_tokens": 4000}, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    seen = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 4:
            break
    stream.close()
    wait_until_quiet(real)


def test_choices_stream_by_index_and_say_the_same(client):
    hot = {**CHAT, "temperature": 1.2, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**hot)
    texts, roles, ends = [""] * 3, [0] * 3, [None] * 3
    order = []
    for chunk in client.chat.completions.create(**hot, stream=True):
        (choice,) = chunk.choices
        order.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == [1, 1, 1]
    assert len(set(texts)) == 3
    assert order != sorted(order), "the choices came one after the other"
    assert whole.usage.prompt_tokens == (client.chat.completions.create(**CHAT).usage.prompt_tokens)


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_are_those_of_the_whole(client, echo):
    asked = {**TEXT, "logprobs": 2, "echo": echo}
    whole = client.completions.create(**asked).choices[0]
    parts = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "text_offset"):
        pieces = [entry for part in parts for entry in getattr(part.logprobs, name)]
        assert pieces == getattr(whole.logprobs, name)
    pieces = [entry for part in parts for entry in part.logprobs.token_logprobs]
    assert pieces[0] == whole.logprobs.token_logprobs[0] or not echo
    known = 1 if echo else 0
    assert pieces[known:] == pytest.approx(whole.logprobs.token_logprobs[known:], abs=1e-4)


def test_a_whole_prompts_logprobs_are_those_of_its_parts(client):
    """The echo of prompt and answer together says of the answer what its making said."""
    made = client.completions.create(**TEXT, logprobs=1).choices[0]
    text = TEXT["prompt"] + made.text
    asked = {**TEXT, "prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True}
    read = client.completions.create(**asked).choices[0].logprobs
    begin = len(read.tokens) - len(made.logprobs.tokens)
    assert read.tokens[begin:] == made.logprobs.tokens
    assert read.token_logprobs[begin:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert read.text_offset[begin] == len(TEXT["prompt"])


class TestStopStrings:
    def test_no_part_of_one_is_ever_streamed(self, client):
        whole = client.chat.completions.create(**CHAT).choices[0].message.content
        assert len(whole) > 6 + 40
        for begin in range(0, len(whole) - 6, 40):
            for length in (1, 2, 6):
                stop = whole[begin : begin + length]
                expected = whole[: whole.index(stop)]
                shown = ""
                for chunk in client.chat.completions.create(**CHAT, stop=stop, stream=True):
                    shown += chunk.choices[0].delta.content or ""
                    assert expected.startswith(shown)
                assert shown == expected
                assert chunk.choices[0].finish_reason == "stop"
                assert chunk.choices[0].stop_reason == stop

    def test_what_only_begins_like_one_is_shown(self, client):
        whole = client.chat.completions.create(**CHAT).choices[0].message.content
        stops = [whole[5:9] + "\0", whole[-3:] + "\0"]
        stream = client.chat.completions.create(**CHAT, stop=stops, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == whole

    def test_tokens_after_one_are_not_counted(self, real, client):
        asked = {**TEXT, "max_tokens": 3000, "stop": ","}
        wait_until_quiet(real)
        before = real.metrics()["generation_tokens_total"]
        answer = client.completions.create(**asked, n=3, extra_body={"ignore_eos": True})
        counted = real.metrics()["generation_tokens_total"] - before
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert counted == answer.usage.completion_tokens < 100
        wait_for(lambda: real.metrics()["num_requests_running"] == 0)

    def test_each_choice_has_its_own_stop(self, client):
        answer = client.completions.create(
            **{**TEXT, "temperature": 1.0, "max_tokens": 40}, n=4, seed=1, stop=[",", "."]
        )
        assert "stop" in {choice.finish_reason for choice in answer.choices}
        for choice in answer.choices:
            assert not {",", "."} & set(choice.text)
            assert choice.finish_reason == "length" or choice.stop_reason in {",", "."}
