import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import load_decoder
from twolane.model.load import weights
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve
from twolane.model.load.safetensors import INDEX

from .checkpoints import VOCAB, make_checkpoint, reference
from .passes import Pool, close, in_chunks, prompt


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint("llama31", tmp_path / "model", seed=3)


def edit(checkpoint, change):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("how", ["overwritten", "cut"])
def test_weights_do_not_change_with_their_file(checkpoint, how):
    """Float32 weights were mapped on a CPU: other bytes were served, or a signal ended it."""
    file = checkpoint / "model.safetensors"
    edit(checkpoint, lambda t: [t.update({n: x.float()}) for n, x in t.items()])
    _, loaded = weights.load_weights(resolve(str(checkpoint)), dtype="float32")
    layer = loaded.layers[1]
    served = loaded.embedding, loaded.norm, layer.o.values, layer.mlp.down.values
    before = [tensor.clone() for tensor in served]
    if how == "cut":
        os.truncate(file, 1000)
    else:
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))
    assert all(map(torch.equal, before, served))


def test_missing_tensors_are_named(checkpoint):
    edit(checkpoint, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"missing tensors: model\.layers\.2\.mlp\.up_proj\.w"):
        load_decoder(resolve(str(checkpoint)))


def test_surplus_tensors_and_doubles_are_what_transformers_makes_of_them(checkpoint, caplog):
    tokens = prompt(10)
    plain = reference(checkpoint)(tokens[None]).logits[0]
    edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    edit(checkpoint, lambda t: t.update({n: v.double() for n, v in t.items() if "norm" in n}))
    logits = in_chunks(load_decoder(resolve(str(checkpoint))), tokens, [10])
    assert "ignored: model.layers.0.self_attn.q_proj.bias" in caplog.text
    close(logits, plain)
    close(logits, reference(checkpoint)(tokens[None]).logits[0])


def test_misshapen_tensors_are_named(checkpoint):
    edit(checkpoint, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight \[63\] instead of \[64\]"):
        load_decoder(resolve(str(checkpoint)))


def test_long_lists_are_cut(checkpoint):
    edit(checkpoint, lambda t: [t.pop(n) for n in list(t) if "mlp" in n])
    with pytest.raises(WeightsError, match=r"and 7 more$"):
        load_decoder(resolve(str(checkpoint)))


def test_weights_that_the_free_memory_does_not_hold_are_refused_before_they_are_read(
    checkpoint, monkeypatch
):
    source = resolve(str(checkpoint))
    size = 4 * source.spec().parameters
    monkeypatch.setattr(weights, "free_memory", lambda: size)
    load_decoder(source)
    monkeypatch.setattr(weights, "free_memory", lambda: size - 1)
    with pytest.raises(MemoryError, match=r"not enough memory: the weights of .* GiB are free"):
        load_decoder(source)
    monkeypatch.setattr(weights, "free_memory", lambda: size // 2)
    weights.load_weights(source, dtype="float32", rank=1, ranks=2)  # another rank has read its part


def test_tied_embeddings_may_be_stored_twice(checkpoint):
    tokens = prompt(10)
    want = in_chunks(load_decoder(resolve(str(checkpoint))), tokens, [10])
    ends = "inv_freq", "cos_cached", "sin_cached"
    buffers = {f"model.layers.0.self_attn.rotary_emb.{end}": torch.ones(8) for end in ends}
    edit(
        checkpoint,
        lambda t: t.update(buffers | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(in_chunks(load_decoder(resolve(str(checkpoint))), tokens, [10]), want)


def tie(checkpoint, tied):
    config = json.loads((checkpoint / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("tied", "stored"), [(True, True), (False, False)])
def test_a_head_is_used_as_the_tensors_have_it(checkpoint, caplog, tied, stored):
    """After vllm PR #51665; the config says otherwise."""
    tie(checkpoint, tied)
    if stored:
        other = {"lm_head.weight": torch.randn(VOCAB, 64)}
        edit(checkpoint, lambda tensors: tensors.update(other))
    tokens = prompt(10)
    model = load_decoder(resolve(str(checkpoint)))
    assert model.spec.tie_embeddings != tied
    logits = in_chunks(model, tokens, [10])
    tie(checkpoint, not tied)
    close(logits, reference(checkpoint)(tokens[None]).logits[0])
    assert "lm_head.weight" in caplog.text


def test_of_tied_tensors_the_classifier_may_be_the_one_that_is_stored(checkpoint):
    """As `safetensors.torch.save_model` leaves it, which keeps one name of each tensor."""
    edit(checkpoint, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    tokens = prompt(10)
    logits = in_chunks(load_decoder(resolve(str(checkpoint))), tokens, [10])
    close(logits, reference(checkpoint)(tokens[None]).logits[0])


def test_a_classifier_that_only_the_index_names_is_missing(tmp_path):
    """The embeddings would give other tokens."""
    folder = make_checkpoint("llama2", tmp_path / "model", shards=3)
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"]["lm_head.weight"]
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing tensors: lm_head\.weight"):
        load_decoder(resolve(str(folder)))


@pytest.mark.parametrize("place", [0, -1], ids=["before", "behind"])
def test_of_two_tensors_of_a_name_the_index_says_which(tmp_path, place):
    """As where files of another checkpoint are used again; without an index nobody knows."""
    folder = make_checkpoint("llama2", tmp_path / "model", shards=3)
    norm = load_decoder(resolve(str(folder))).weights.norm
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    others = {*places.values()} - {places["model.norm.weight"]}
    other = folder / sorted(others)[place]
    stale = {**load_file(other), "model.norm.weight": torch.zeros(64)}
    save_file(stale, other, {"format": "pt"})
    assert torch.equal(load_decoder(resolve(str(folder))).weights.norm, norm)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"has model\.norm\.weight, and so has another file"):
        load_decoder(resolve(str(folder)))


def test_numbered_files_need_no_index(tmp_path):
    """As other servers read them; one that is lacking is named."""
    folder = make_checkpoint("llama2", tmp_path / "model", shards=3)
    whole = load_decoder(resolve(str(folder)))
    (folder / INDEX).unlink()
    (folder / "consolidated.safetensors").write_bytes(b"")
    found = load_decoder(resolve(str(folder)))
    assert torch.equal(found.weights.embedding, whole.weights.embedding)
    first, *_ = sorted(folder.glob("model-*"))
    first.unlink()
    with pytest.raises(ValueError, match=f"lacks {first.name}"):
        load_decoder(resolve(str(folder)))
    for others in sorted(folder.glob("model-*"))[1:]:
        others.unlink()
    with pytest.raises(ValueError, match=f"lacks {first.name}"):
        load_decoder(resolve(str(folder)))


def test_files_that_git_has_not_fetched_are_told(checkpoint):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
    (checkpoint / "model.safetensors").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors waits for git lfs pull"):
        load_decoder(resolve(str(checkpoint)))


def test_broken_files(checkpoint):
    source = resolve(str(checkpoint))
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_decoder(source)
    file.rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load_decoder(source)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks model-00001-of-00002\.safetensors"):
        load_decoder(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"index\.json is not a JSON object"),
        ("[]", r"index\.json is not a JSON object"),
        ("{}", r"index\.json: .*`weight_map`"),
        ('{"weight_map": {"model.norm.weight": 1}}', r"index\.json: .*weight_map"),
        ('{"weight_map": {"a": "../model/m.safetensors"}}', "is outside its folder"),
        ('{"weight_map": {"a": "/etc/m.safetensors"}}', "is outside its folder"),
    ],
)
def test_broken_indices_are_refused(checkpoint, content, message):
    (checkpoint / "model.safetensors").rename(checkpoint / "m.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_decoder(resolve(str(checkpoint)))


def test_an_index_that_was_left_behind_does_not_count(checkpoint):
    """`transformers` takes the single file, too, and leaves the index of an earlier save."""
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        reference(checkpoint).num_parameters()
        == load_decoder(resolve(str(checkpoint))).spec.parameters
    )


def test_dummy_weights_follow_the_seed(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    source = resolve(str(checkpoint), "dummy")
    one, same, other = (
        load_decoder(source, load_format="dummy", seed=s).weights.layers[1].mlp.down.values
        for s in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.01 < float(one.std()) < 0.03


def test_dummy_shape_needs_no_files(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path))
    source = resolve("smollm2-135m-instruct", "dummy")
    decoder = load_decoder(source, load_format="dummy", max_positions=16_384, dtype="bfloat16")
    assert decoder.spec.max_positions == 16_384
    assert decoder.dtype == torch.bfloat16
    assert source.tokenizer is None
    assert not list(tmp_path.iterdir())
    logits = in_chunks(decoder, prompt(5), [5])
    assert logits.isfinite().all()


def test_progress_and_arguments(checkpoint):
    seen: list[tuple[str, float]] = []
    load_decoder(resolve(str(checkpoint)), progress=lambda *news: seen.append(news))
    assert seen == [("weights", i / 4) for i in range(5)]
    with pytest.raises(ValueError, match="dtype must be one of"):
        load_decoder(resolve(str(checkpoint)), dtype="int8")


def test_the_pool_takes_the_bytes_it_says(checkpoint):
    decoder = load_decoder(resolve(str(checkpoint)))
    pool = Pool(decoder, pages=10)
    held = sum(layer.numel() * layer.itemsize for layer in pool.kv.layers)
    assert held == 80 * decoder.spec.kv_bytes_per_token(decoder.dtype.itemsize)
    assert pool.kv.k[0].shape == pool.kv.v[0].shape == (80, 2, 16)
