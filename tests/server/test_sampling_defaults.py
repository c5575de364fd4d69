"""Requests that say nothing of sampling get what the model's authors would have."""

import json

import pytest

from twolane import LLM, SamplingParams
from twolane.model.load.hub import resolve

from .serving import serving, write_tiny_model

ASK = {"prompt": [5], "seed": 1, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
DUMMY = ("--load-format", "dummy", "--kv-tokens", "2000")


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """A model whose authors have the likeliest token taken."""
    path = write_tiny_model(tmp_path_factory.mktemp("greedy"))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    return path


def tokens(served, **fields):
    status, _, body = served.request("/v1/completions", {**ASK, **fields})
    assert status == 200
    return body["choices"][0]["token_ids"]


@pytest.mark.parametrize(("defaults", "temperature"), [("model", 0), ("openai", 1)])
def test_a_server_has_the_models_or_openais(greedy, tmp_path, defaults, temperature):
    log = tmp_path / "err"
    args = (str(greedy), *DUMMY, "--sampling-defaults", defaults)
    with serving(*args, stderr=log) as served:
        drawn = {each: tokens(served, temperature=each) for each in (0, 1)}
        assert drawn[0] != drawn[1]
        assert tokens(served) == drawn[temperature]
    said = "the default of temperature is 0, as the model recommends"
    assert (said in log.read_text()) == (defaults == "model")


@pytest.mark.full
def test_offline_too(greedy):
    with LLM(str(greedy), load_format="dummy", kv_tokens=2000) as llm:

        def drawn(params):
            return llm.generate([5], params)[0].outputs[0].token_ids

        asked = [drawn(SamplingParams(temperature=t, seed=1, max_tokens=16)) for t in (0, 1)]
        assert asked[0] != asked[1]
        assert drawn(None) == asked[0]
        (piece, *rest) = llm.stream([5])
        assert [t for each in (piece, *rest) for t in each.token_ids] == asked[0]


def test_what_cannot_be_is_left_out_with_a_warning(tmp_path, caplog):
    path = write_tiny_model(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"top_p": 2, "temperature": 0}))
    assert resolve(str(path)).sampling_defaults() == {"temperature": 0}
    assert "generation_config.json: top_p is not used: top_p must be between 0 and 1" in caplog.text
