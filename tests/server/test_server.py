"""The endpoints of a running server, asked as users ask them."""

import json
import random

import openai
import pytest

from twolane.cli.doctor_model import report

from .conftest import MODEL
from .serving import wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(real):
    return openai.OpenAI(base_url=f"{real.base}/v1", api_key="none", max_retries=0)


def test_the_announcement_says_what_is_served(real):
    level = "(1,1)" if " on cpu" in real.announcement else "levels ("
    for part in (MODEL, "static-split", level, "KV 20,000 tokens", "context 8,192"):
        assert part in real.announcement
    assert real.announcement.endswith("no SLOs (see --slo-ttft-ms, --slo-tbt-ms)")
    profile, dashboard = real.more
    assert profile.startswith("Profile: ")
    assert dashboard == f"Dashboard: {real.base}/dashboard"


class TestChat:
    def test_answers(self, client):
        answer = client.chat.completions.create(**GREEDY, messages=QUESTION)
        (choice,) = answer.choices
        assert "Paris" in choice.message.content
        assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
        assert answer.usage.total_tokens == (
            answer.usage.prompt_tokens + answer.usage.completion_tokens
        )

    def test_a_stream_says_the_same(self, client):
        whole = client.chat.completions.create(**GREEDY, messages=QUESTION)
        stream = client.chat.completions.create(
            **GREEDY, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "stop"]
        assert last.choices == []
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert {chunk.id for chunk in chunks} == {last.id}

    def test_a_repeated_prompt_is_cached(self, client):
        messages = [{"role": "user", "content": "Name three rivers. " * 4}]
        first, second = (
            client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2)
            for _ in range(2)
        )
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached > first.usage.prompt_tokens_details.cached_tokens
        assert cached < second.usage.prompt_tokens

    def test_parts_of_text_are_text(self, client):
        parts = [{"type": "text", "text": "What is the capital of France?"}]
        answer = client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": parts}]
        )
        assert "Paris" in answer.choices[0].message.content


class TestCompletions:
    def test_text(self, client):
        answer = client.completions.create(
            **GREEDY, prompt="The capital of France is", max_tokens=3
        )
        assert "Paris" in answer.choices[0].text
        assert answer.choices[0].finish_reason == "length"

    def test_the_default_is_sixteen_tokens(self, client):
        answer = client.completions.create(**GREEDY, prompt="Once", extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 16

    def test_lists_make_a_choice_each(self, client):
        prompts = ["The capital of France is", "One, two, three,"]
        both = client.completions.create(**GREEDY, prompt=prompts, max_tokens=4)
        alone = [
            client.completions.create(**GREEDY, prompt=p, max_tokens=4).choices[0].text
            for p in prompts
        ]
        assert [c.text for c in sorted(both.choices, key=lambda c: c.index)] == alone

    def test_a_streamed_list(self, client):
        prompts = ["The capital of France is", "One, two, three,"]
        whole = client.completions.create(**GREEDY, prompt=prompts, max_tokens=4)
        texts, ends = ["", ""], []
        for chunk in client.completions.create(**GREEDY, prompt=prompts, max_tokens=4, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        assert texts == [choice.text for choice in whole.choices]
        assert ends == ["length", "length"]

    def test_token_ids_in_and_out(self, client, tokenizer):
        ids = tokenizer.backend.encode("The capital of France is").ids
        answer = client.completions.create(
            **GREEDY, prompt=ids, max_tokens=3, extra_body={"return_token_ids": True}
        )
        (choice,) = answer.choices
        assert choice.prompt_token_ids == ids
        assert tokenizer.backend.decode(choice.token_ids) == choice.text

    def test_a_prompt_may_be_cut_to_leave_room_for_the_answer(self, real):
        ends = {"logit_bias": {"2": 100}, "truncate_prompt_tokens": -1}
        for prompt, room, kept in ((9, 8187, 5), (9, 8000, 9), (8200, 8190, 2), (9, None, 9)):
            body = {"prompt": [7] * prompt, "max_tokens": room, **ends}
            status, _, answer = real.request("/v1/completions", body)
            assert (status, answer["usage"]["prompt_tokens"]) == (200, kept)
        body = {"prompt": [7], "max_tokens": 8192, **ends}
        assert real.request("/v1/completions", body)[2]["error"]["param"] == "max_tokens"

    def test_a_stop_token_ends_and_is_not_shown(self, client, tokenizer):
        (paris,) = tokenizer.backend.encode(" Paris").ids
        answer = client.completions.create(
            **GREEDY,
            prompt="The capital of France is",
            extra_body={"stop_token_ids": [paris], "return_token_ids": True},
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.token_ids) == ("", "stop", [paris])

    def test_a_seed_fixes_the_answer(self, client):
        def ask(seed):
            answer = client.completions.create(
                model=MODEL, prompt="Once upon a time", seed=seed, max_tokens=12, temperature=1.5
            )
            return answer.choices[0].text

        assert ask(7) == ask(7)
        assert len({ask(seed) for seed in range(4)}) > 1

    def test_priority_is_accepted(self, client):
        client.completions.create(**GREEDY, prompt="a", max_tokens=1, extra_body={"priority": -3})


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 8192)
    assert client.models.retrieve(MODEL).id == MODEL


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "status", "code", "param"),
        [
            ({"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix"),
            ({"prompt": "x", "stop": ["y", ""]}, 400, "invalid_value", "stop"),
            ({"prompt": "x", "stop": [f"s{i}" for i in range(33)]}, 400, "invalid_value", "stop"),
            ({"prompt": "x", "n": 0}, 400, "invalid_value", "n"),
            ({"prompt": "x", "n": 129}, 400, "invalid_value", "n"),
            ({"prompt": "x", "n": 1, "best_of": 2}, 400, "invalid_value", "best_of"),
            ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias"),
            ({"prompt": "x", "logit_bias": {"49152": 1}}, 400, "invalid_value", "logit_bias"),
            ({"prompt": "x", "logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
            ({"prompt": "x", "logprobs": 21}, 400, "invalid_value", "logprobs"),
            ({"prompt": "x", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
            ({"prompt": ["x"] * 100, "n": 128}, 400, "too_many_answers", "n"),
            # Before the prompts are looked at, of which there may be hundreds of thousands.
            ({"prompt": [""] * 1025}, 400, "too_many_answers", "prompt"),
            ({"prompt": "x", "nope": 2}, 400, "unknown_parameter", "nope"),
            ({"prompt": 5}, 400, "invalid_value", "prompt"),
            ({}, 400, "invalid_value", "prompt"),
            ({"prompt": ""}, 400, "invalid_prompt", "prompt"),
            ({"prompt": [1, 49152]}, 400, "invalid_value", "prompt"),
            ({"prompt": "x", "stop_token_ids": [10**6]}, 400, "invalid_value", "stop_token_ids"),
            ({"prompt": "x", "temperature": -1}, 400, "invalid_value", "temperature"),
            ({"prompt": [1] * 8192}, 400, "context_length_exceeded", "prompt"),
            (
                {"prompt": [1] * 8000, "max_tokens": 193},
                *(400, "context_length_exceeded", "max_tokens"),
            ),
            ({"prompt": "x", "model": "gpt-9"}, 404, "model_not_found", "model"),
        ],
    )
    def test_refusals_name_the_field(self, real, body, status, code, param):
        for stream in (False, True):
            got, _, answer = real.request("/v1/completions", {**body, "stream": stream})
            assert got == status
            error = answer["error"]
            assert (error["code"], error["param"]) == (code, param)
            assert error["type"] == "invalid_request_error"
            assert param in error["message"] or param == "model"
            if code == "context_length_exceeded":  # the words that clients look for
                assert "This model's maximum context length is 8192 tokens" in error["message"]

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            (["x", ""], "prompt 1 is empty"),
            ([[5], [5], [1] * 8192], "prompt 2 has 8192 tokens"),
            ([[]], "the prompt is empty"),
        ],
    )
    def test_one_of_several_prompts_is_named(self, real, prompts, message):
        _, _, answer = real.request("/v1/completions", {"prompt": prompts})
        assert message in answer["error"]["message"]
        assert answer["error"]["param"] == "prompt"

    def test_another_model_is_not_repeated_whole(self, real):
        """However long the name is."""
        status, _, answer = real.request("/v1/completions", {"prompt": "x", "model": "m" * 10**6})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert len(answer["error"]["message"]) < 400

    def test_the_client_raises_its_own_errors(self, client):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError, match="audio"):
            client.chat.completions.create(
                model=MODEL, messages=QUESTION, audio={"voice": "alloy", "format": "wav"}
            )

    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"prompt": NaN}'),
            *(b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "x", "seed": 1e999}'),
        ],
    )
    def test_malformed_bodies(self, real, data):
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, _, answer = real.request(path, data=data)
            assert status == 400
            assert answer["error"]["message"]

    def test_unknown_routes_and_methods(self, real):
        for path in ("/v1/nothing", "/v1/models/none", "/%0Aa"):
            assert real.request(path)[2]["error"]["code"] in ("not_found", "model_not_found")
        status, headers, answer = real.request("/v1/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        assert headers["Allow"] == "POST"

    def test_mutilated_bodies_never_break_the_server(self, real):
        rng = random.Random(0)
        good = json.dumps({"messages": QUESTION, "max_tokens": 1, "stream": False}).encode()
        for _ in range(300):
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            assert real.request("/v1/chat/completions", data=bytes(data))[0] in (200, 400, 404)
        assert real.request("/health")[0] == 200


def test_metrics_add_up(real):
    """Over all that tests asked of this server; some of it was given up after a first token."""
    wait_for(lambda: real.metrics()["requests_in_flight"] == 0)
    before = real.metrics()
    real.request("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    real.request("/v1/completions", {"prompt": "x", "n": 0})
    wait_for(lambda: real.metrics()["requests_in_flight"] == 0)
    m = real.metrics()
    ended = m["request_success_total"] + m["requests_refused_total"]
    assert m["requests_received_total"] == ended + m.get("requests_aborted_total", 0)
    assert m["prefix_cache_hits_total"] <= m["prefix_cache_queries_total"]
    grown = {
        "requests_received_total": 2,
        "request_success_total": 1,
        "requests_refused_total": 1,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "inter_token_latency_seconds_count": 2,
        "generation_tokens_total": 3,
    }
    assert {name: m[name] - before.get(name, 0) for name in grown} == grown


def test_the_openapi_description_names_the_fields(real):
    schemas = real.request("/openapi.json")[2]["components"]["schemas"]
    assert {"prompt", "temperature", "return_token_ids"} <= (
        schemas["CompletionRequest"]["properties"].keys()
    )
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_tokens_are_those_that_the_doctor_prints(real, capsys):
    for text in ("Grüße, 12 Welten <|im_end|>\n", "  日本 👍", ""):
        report(MODEL, text, None)
        printed = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        _, _, told = real.request("/tokenize", {"prompt": text, "return_token_strs": True})
        shown = [(int(token), name) for token, name, _ in printed]
        assert shown == list(zip(told["tokens"], told["token_strs"], strict=True))
        _, _, back = real.request("/detokenize", {"tokens": told["tokens"]})
        assert back["prompt"] == text
