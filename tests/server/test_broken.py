"""A model that gives NaN: what its clients are told, and those beside them."""

import pytest
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import make_checkpoint

from .serving import serving, wait_for
from .test_lifecycle import Stream, quiet

POISON = 251
BODY = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a checkpoint in which the embedding of one token is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    path = make_checkpoint("qwen2", folder / "model", seed=1)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with serving(str(path), "--kv-tokens", "20000", stderr=folder / "log") as served:
        served.log_file = folder / "log"
        yield served


def test_a_broken_request_gets_500_and_others_their_answers(served):
    stream = Stream(served, BODY)
    first = stream.next_token()
    before = served.metrics()["broken_logits_total"]
    status, _, body = served.request("/v1/completions", {**BODY, "prompt": [5, POISON, 7]})
    assert status == 500
    assert body["error"]["code"] == "model_error"
    assert "NaN" in body["error"]["message"]
    rest = [t for event in stream.events() for t in event["choices"][0]["token_ids"]]
    assert len(first + rest) == BODY["max_tokens"]
    wait_for(lambda: quiet(served))
    figures = served.metrics()
    assert figures["broken_logits_total"] == before + 1
    assert figures["requests_received_total"] == (
        figures["request_success_total"] + figures["requests_aborted_total"]
    )
    assert served.request("/health")[0] == 200
    wait_for(lambda: "a prompt of 3 tokens failed: the model" in served.log_file.read_text())


def test_a_stream_that_breaks_ends_with_the_error(served):
    """With the token that was chosen before, and without [DONE]."""
    stream = Stream(served, {**BODY, "logit_bias": {POISON: 100}})
    events = list(stream.events())
    assert events[-1]["error"]["code"] == "model_error"
    tokens = [t for event in events[:-1] for t in event["choices"][0]["token_ids"]]
    assert tokens in ([], [POISON])
