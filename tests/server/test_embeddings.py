"""Embeddings equal those of transformers, and are refused for models that give none."""

import base64
import json
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from tests.model.checkpoints import VOCAB, make_checkpoint
from twolane.frontend.pooling import read_embedding

from .parrot import tokenizer
from .serving import serving

TEXTS = ["A lane.", "Two lanes of one road, side by side.", "x" * 300]


def write_embedder(folder: Path, **config) -> Path:
    """A tiny Qwen3 as Qwen3-Embedding is stored: without a classifier, whose names lack `model.`"""
    made = make_checkpoint("qwen3", folder / "whole", seed=3)
    path = folder / "embedder"
    AutoModel.from_pretrained(made, dtype=torch.float32).save_pretrained(path)
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**given, "architectures": ["Qwen3ForCausalLM"], **config})
    )
    tokenizer().save(str(path / "tokenizer.json"))
    write_pooling(path, pooling_mode_lasttoken=True)
    return path


def write_pooling(path, **pooling):
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return write_embedder(tmp_path_factory.mktemp("embeds"), is_matryoshka=True)


@pytest.fixture(scope="module")
def client(embedder):
    args = ("--kv-tokens", "4000", "--dtype", "float32", "--served-model-name", "e")
    with (
        serving(str(embedder), *args, "--system", "chunked") as server,
        openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(embedder):
    """What transformers makes of tokens."""
    model = AutoModel.from_pretrained(embedder, dtype=torch.float32)

    def embed(tokens):
        with torch.no_grad():
            last = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(last, dim=0).numpy()

    return embed


def vectors(answer):
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return [np.array(each.embedding, np.float32) for each in answer.data]


def test_embeddings_are_those_of_transformers(client, expected):
    """Long and short ones side by side, sent as text, as numbers and as base64."""
    tokens = [tokenizer().encode(text).ids for text in TEXTS]
    wanted = [expected(each) for each in tokens]
    whole = client.embeddings.create(model="e", input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model="e", input=tokens)  # the client asks for base64
    for answer in (whole, packed):
        np.testing.assert_allclose(vectors(answer), wanted, atol=2e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    one = client.embeddings.create(model="e", input=TEXTS[1], dimensions=8)
    cut = wanted[1][:8] / np.linalg.norm(wanted[1][:8])
    np.testing.assert_allclose(vectors(one), [cut], atol=2e-5)
    answer = client.embeddings.with_raw_response.create(
        model="e", input=tokens[0], encoding_format="base64"
    )
    raw = json.loads(answer.content)["data"][0]["embedding"]
    got = np.frombuffer(base64.b64decode(raw), np.float32)
    np.testing.assert_allclose(got, wanted[0], atol=2e-5)


def test_what_cannot_be_embedded_is_refused_by_name(client):
    for field, given in {
        "input": {"input": []},
        "dimensions": {"input": "a", "dimensions": -1},
        "encoding_format": {"input": "a", "encoding_format": "int8"},
        "encoding": {"input": "a", "extra_body": {"encoding": 1}},
    }.items():
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="e", **given)
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="e", input=[[VOCAB + 7]])
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_a_model_of_texts_says_what_embeds(tiny):
    status, _, answer = tiny.request("/v1/embeddings", {"input": [1, 2]})
    assert (status, answer["error"]["code"]) == (501, "not_served")
    assert "modules.json" in answer["error"]["message"]


def test_what_a_checkpoint_says_of_its_vectors_holds(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert "modules.json" in str(read_embedding(path).refusal)
    write_pooling(path, pooling_mode_mean_tokens=True)
    assert "last one" in str(read_embedding(path).refusal)
    write_pooling(path, pooling_mode_lasttoken=True)
    found = read_embedding(path)
    assert found.refusal is None
    assert "is_matryoshka" in str(found.check_dimensions(8))
    (path / "config.json").write_text('{"matryoshka_dimensions": [4, 8]}')
    found = read_embedding(path)
    assert found.check_dimensions(8) is None
    assert "one of 4, 8" in str(found.check_dimensions(5))
    (path / "config.json").write_text('{"is_matryoshka": true, "hidden_size": 16}')
    found = read_embedding(path)
    assert found.check_dimensions(16) is found.check_dimensions(1) is None
    assert "between 1 and 16" in str(found.check_dimensions(17))
    assert "between 1 and 16" in str(found.check_dimensions(0))
    (path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Dense"}]')
    assert "Dense" in str(read_embedding(path).refusal)
    (path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_embedding(path)
