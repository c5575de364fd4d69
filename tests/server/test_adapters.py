"""Adapters over HTTP and in an `LLM`: asked for by name, loaded, refused and unloaded."""

import threading

import pytest
import torch

from tests.model.adapters import make_adapter
from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.model.passes import prompt
from tests.model.test_lora import alone, load, run
from twolane import LLM, SamplingParams
from twolane.frontend.generation import GenerationRefused
from twolane.model.load.hub import resolve
from twolane.model.lora import AdapterPool
from twolane.server.anthropic.request import MessagesRequest
from twolane.server.responses.request import ResponsesRequest

from .serving import serving, wait_for
from .test_fleet_state import state

TOKENS = 8
PROMPT = prompt(40, seed=3).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint and adapters for it, two of which are no good."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint("qwen3", folder / "base", seed=1, layers=2)
    for seed, name in enumerate(("a", "b", "c")):
        make_adapter(base, folder / name, rank=4 << seed, seed=seed)
    make_adapter(base, folder / "large", rank=17)
    make_adapter(base, folder / "dora", config={"use_dora": True})
    other = make_checkpoint("llama2", folder / "other", layers=2)
    make_adapter(other, folder / "foreign")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Adapter → the greedy answer to `PROMPT`."""
    decoder = load_decoder(resolve(str(folder / "base")))
    pool, answers = AdapterPool(decoder.weights, 1), {}
    with torch.inference_mode():
        for name in (None, "a", "b", "c"):
            pool.put(0, load(folder / name, decoder) if name else None)
            tokens = torch.tensor(PROMPT)
            for _ in range(TOKENS):
                logits = run(decoder, pool, [tokens], [0])[0] if name else alone(decoder, tokens)
                tokens = torch.cat([tokens, logits[-1:].argmax(dim=1)])
            answers[name] = tokens[len(PROMPT) :].tolist()
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


@pytest.fixture(scope="module")
def served(folder):
    args = ("--lora", f"the-first={folder / 'a'}", "--lora-endpoints", "--max-loras", "2")
    options = ("--served-model-name", "base", "--kv-tokens", "8000")
    with serving(str(folder / "base"), *args, *options) as served:
        yield served


def body(model, **more):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return {**asked, "return_token_ids": True, "ignore_eos": True, **more}


def ask(served, model):
    """The tokens of an answer, and how many of the prompt were in the prefix cache."""
    status, _, answer = served.request("/v1/completions", body(model))
    assert status == 200, answer
    assert answer["model"] == model
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def load_into(served, name, path):
    given = {"lora_name": name, "lora_path": str(path)}
    return served.request("/v1/load_lora_adapter", given)


def unload_from(served, name):
    return served.request("/v1/unload_lora_adapter", {"lora_name": name})


def test_a_router_is_told_the_landmarks_of_an_adapters_prompts(served):
    def told(model):
        asked = body(model, prompt=PROMPT * 4)
        assert served.request("/v1/completions", asked)[0] == 200
        status, _, answer = served.request("/fleet/landmarks/completions", asked)
        assert (status, answer["prompt_tokens"]) == (200, 4 * len(PROMPT))
        assert answer["hashes"]
        wait_for(lambda: set(answer["hashes"]) <= state(served).digest.as_set())
        return set(answer["hashes"])

    assert not told("base") & told("the-first")


def test_an_adapter_answers_by_its_name_and_shares_no_page_with_the_model(served, expected):
    for _ in range(2):
        assert ask(served, "base")[0] == expected[None]
        assert ask(served, "the-first")[0] == expected["a"]
    assert ask(served, "the-first")[1] == ask(served, "base")[1] == 32


def test_models_are_listed_with_their_parent(served, folder):
    _, _, listed = served.request("/v1/models")
    cards = {card["id"]: card for card in listed["data"]}
    assert cards["base"]["parent"] is None
    assert cards["the-first"]["parent"] == "base"
    assert cards["the-first"]["root"] == str(folder / "a")
    assert served.request("/v1/models/the-first")[2] == cards["the-first"]


def test_an_unknown_name_is_a_404(served):
    for path in ("/v1/completions", "/v1/unload_lora_adapter"):
        given = body("nobody") if path == "/v1/completions" else {"lora_name": "nobody"}
        status, _, answer = served.request(path, given)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["param"] == ("lora_name" if "lora_name" in given else "model")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("large", "rank 17: the most that is served here is 16"),
        ("dora", "use_dora is not served"),
        ("foreign", "this base model wants"),
        ("base", "no adapter_config.json"),
        ("nowhere", "is no directory"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_else_changes(
    path, words, served, folder, expected
):
    status, _, answer = load_into(served, "new", folder / path)
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert words in answer["error"]["message"]
    assert served.request("/v1/completions", body("new"))[0] == 404
    assert ask(served, "the-first")[0] == expected["a"]


def test_names_in_use_and_full_pools_are_refused(served, folder):
    assert "loaded already" in load_into(served, "the-first", folder / "b")[2]["error"]["message"]
    assert load_into(served, "base", folder / "b")[0] == 400
    assert unload_from(served, "base")[0] == 400
    assert load_into(served, "second", folder / "b")[0] == 200
    assert (
        "2 adapters are loaded" in load_into(served, "third", folder / "c")[2]["error"]["message"]
    )
    assert unload_from(served, "second")[0] == 200


def test_a_name_that_is_loaded_again_is_the_new_adapter(served, folder, expected):
    for version, known in (("b", 0), ("c", 0), ("b", 32)):
        assert load_into(served, "again", folder / version)[0] == 200
        assert ask(served, "again") == (expected[version], known)
        assert ask(served, "again") == (expected[version], 32)
        assert unload_from(served, "again")[0] == 200
    assert served.request("/v1/completions", body("again"))[0] == 404


def test_unloading_waits_for_requests_in_flight(served, folder, expected):
    assert load_into(served, "busy", folder / "b")[0] == 200
    answers = {}

    def long_answer():
        answers["request"] = served.request("/v1/completions", body("busy", max_tokens=300))

    def unload():
        answers["unload"] = unload_from(served, "busy")

    asking, unloading = (threading.Thread(target=each) for each in (long_answer, unload))
    asking.start()
    wait_for(lambda: served.metrics()["num_requests_running"] or "request" in answers)
    unloading.start()
    asking.join()
    unloading.join()
    status, _, answer = answers["request"]
    assert status == 200
    tokens = answer["choices"][0]["token_ids"]
    assert (len(tokens), tokens[:TOKENS]) == (300, expected["b"])
    assert answers["unload"][0] == 200
    assert served.request("/v1/completions", body("busy"))[0] == 404


@pytest.mark.full
def test_two_ranks_answer_as_one(folder, expected):
    args = ("--lora", f"one={folder / 'a'}", "--lora-endpoints", "--tensor-parallel-size", "2")
    with serving(str(folder / "base"), *args, "--kv-tokens", "4000") as served:
        assert ask(served, "one")[0] == expected["a"]
        assert load_into(served, "two", folder / "c")[0] == 200
        assert ask(served, "two")[0] == expected["c"]
        assert ask(served, str(folder / "base"))[0] == expected[None]


def test_metrics_count_requests_by_adapter(served):
    ask(served, "the-first")
    text = served.request("/metrics")[2]
    assert 'twolane:adapter_requests_total{adapter="the-first",model_name="base"}' in text


def test_the_endpoints_are_off_by_default(tiny):
    assert load_into(tiny, "new", "/nowhere")[0] == 404


def test_every_way_to_ask_names_the_model():
    message = {"role": "user", "content": "Hi"}
    asked = ResponsesRequest.model_validate({"model": "a", "input": "Hi"})
    assert asked.request([]).adapter == "a"
    given = {"model": "a", "messages": [message], "max_tokens": 5}
    assert MessagesRequest.model_validate(given).request(lambda _: False).adapter == "a"


@pytest.mark.full
def test_an_llm_answers_with_an_adapter(folder, expected):
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    adapters = {"one": str(folder / "a"), "two": str(folder / "c")}
    with LLM(str(folder / "base"), lora=adapters, kv_tokens=4000, device="cpu") as llm:
        for name, version in ((None, None), ("one", "a"), ("two", "c")):
            [output] = (
                llm.generate(PROMPT, greedy, lora=name) if name else llm.generate(PROMPT, greedy)
            )
            assert output.token_ids == expected[version]
        with pytest.raises(GenerationRefused, match="'three' does not exist"):
            llm.generate(PROMPT, greedy, lora="three")
