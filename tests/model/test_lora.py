"""Adapters: what is read, what is refused, and that the decoder computes what PEFT computes."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import load_decoder
from twolane.model.attention import Batch, Segment
from twolane.model.load import peft
from twolane.model.load.adapter_files import digest_of
from twolane.model.load.hub import resolve
from twolane.model.load.peft import AdapterError, read_adapter
from twolane.model.lora import AdapterPool
from twolane.model.sharding import Shard

from .adapters import JOINED, MODULES, make_adapter, merge
from .checkpoints import make_checkpoint
from .passes import PAGE, Pool, prompt

FAMILIES = (
    *("llama31", "llama-bias", "mistral", "qwen2", "qwen3", "phi3", "phi4-mini"),
    *(
        "granite",
        "smollm3",
        "olmo2",
        "glm",
        "glm4",
        "gemma3",
        "olmo3",
        "seed-oss",
        "exaone4-hybrid",
    ),
    *("qwen2-moe", "qwen3-moe", "mixtral", "glm4-moe", "ernie4.5-moe", "minimax-m2", "mellum"),
    *("gemma4", "gemma4-moe", "gemma4-inputs", "laguna", "gpt-oss"),
)
LISTED = dict.fromkeys(
    (
        "gemma3",
        "mellum",
        "gemma4",
        "gemma4-moe",
        "gemma4-inputs",
        "gemma4-unified",
        "laguna",
        "gpt-oss",
    ),
    4,
)
"""Layers of fixtures that list something for each of them."""
DENSE = r".*\.(self_attn|mlp)\.[a-z]+_proj"
TARGETS = {
    **{"mellum": r".*self_attn\..*_proj"},
    **dict.fromkeys(("gemma4-moe", "gemma4-inputs", "gemma4-unified"), DENSE),
}
"""What PEFT finds no layer for by itself: experts are parameters to it; and inputs of layers have
no adapters."""


def load(path, decoder, **more):
    return read_adapter(path, decoder.shard, decoder.dtype, **more)


def alike(ours, theirs):
    """Adapters of such strength amplify the rounding of float32; a wrong one differs by more than
    1."""
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def run(decoder, pool, sequences, slots):
    """Logits of whole sequences in one pass, each with its slot's adapter."""
    kv = Pool(decoder)
    segments = [Segment(0, len(each), kv.take(len(each))) for each in sequences]
    rows = np.repeat(slots, [len(each) for each in sequences])
    products = pool.products(decoder.products, rows)
    hidden, batch = decoder.embed(torch.cat(sequences)), Batch.build(segments, PAGE)
    for i in range(decoder.spec.layers):
        hidden = decoder.layer(i, hidden, batch, kv.kv, products)
    return list(decoder.head(hidden).split([len(each) for each in sequences]))


def merged(base, adapter, path):
    """The checkpoint with the adapter merged into its weights, loaded."""
    return load_decoder(resolve(str(merge(base, adapter, path))))


def alone(decoder, tokens):
    return run(decoder, AdapterPool(decoder.weights, 0), [tokens], [-1])[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("base") / "qwen3", seed=1, layers=2)


@pytest.fixture(scope="module")
def decoder(base):
    return load_decoder(resolve(str(base)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_merged_weights_compute(family, tmp_path):
    base = make_checkpoint(family, tmp_path / "base", seed=1, layers=LISTED.get(family, 2))
    decoder, adapter = load_decoder(resolve(str(base))), make_adapter(base, tmp_path / "adapter")
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(40)
    pool.put(0, load(adapter, decoder))
    [ours] = run(decoder, pool, [tokens], [0])
    alike(ours, alone(merged(base, adapter, tmp_path / "merged"), tokens))
    assert (ours - alone(decoder, tokens)).abs().max() > 1.0


@pytest.mark.parametrize("module", [*MODULES, *JOINED])
def test_each_module_alone(module, decoder, base, tmp_path):
    if module in JOINED and module not in MODULES:
        base = make_checkpoint("phi3", tmp_path / "base", seed=1, layers=2)
        decoder = load_decoder(resolve(str(base)))
    adapter = make_adapter(base, tmp_path / "adapter", modules=[module], layers=[1], rank=3)
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(20)
    pool.put(0, load(adapter, decoder))
    [ours] = run(decoder, pool, [tokens], [0])
    alike(ours, alone(merged(base, adapter, tmp_path / "merged"), tokens))
    assert not torch.equal(ours, alone(decoder, tokens))


@pytest.mark.parametrize("rank", [1, 2, 5, 16, 33, 64])
@pytest.mark.parametrize("rslora", [False, True])
def test_each_rank(rank, rslora, decoder, base, tmp_path):
    config = {"use_rslora": rslora, "lora_alpha": 1.5 * rank**0.5}
    adapter = make_adapter(base, tmp_path / "adapter", rank=rank, config=config)
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(20)
    pool.put(0, load(adapter, decoder))
    alike(
        run(decoder, pool, [tokens], [0])[0],
        alone(merged(base, adapter, tmp_path / "merged"), tokens),
    )


def test_ranks_and_alphas_of_some_modules(decoder, base, tmp_path):
    config = {"rank_pattern": {"q_proj": 3, "down_proj": 16}, "alpha_pattern": {"o_proj": 2.5}}
    adapter = make_adapter(base, tmp_path / "adapter", config=config)
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(20)
    pool.put(0, load(adapter, decoder))
    want = alone(merged(base, adapter, tmp_path / "merged"), tokens)
    alike(run(decoder, pool, [tokens], [0])[0], want)


def test_eight_adapters_and_none_in_one_batch(decoder, base, tmp_path):
    pool, kinds = AdapterPool(decoder.weights, 8), [1, 2, 3, 4, 8, 16, 32, 64]
    lengths = [13, 1, 20, 5, 9, 17, 2, 30, 11, 6, 14]
    slots = [3, -1, 0, 1, 3, 2, 4, 5, 6, 7, -1]
    for slot, rank in enumerate(kinds):
        path = make_adapter(base, tmp_path / str(slot), rank=rank, seed=slot)
        pool.put(slot, load(path, decoder))
    sequences = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    together = run(decoder, pool, sequences, slots)
    for ours, tokens, slot in zip(together, sequences, slots, strict=True):
        alike(ours, run(decoder, pool, [tokens], [slot])[0])


def test_without_adapters_the_products_are_the_decoders_own(decoder, base, tmp_path):
    pool = AdapterPool(decoder.weights, 2)
    pool.put(1, load(make_adapter(base, tmp_path / "adapter"), decoder))
    assert pool.products(decoder.products, np.full(5, -1)) is decoder.products


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block128"])
def test_adapters_over_quantised_weights(scheme, decoder, base, tmp_path):
    """The base's product is as rounded as ever; what is added is not."""
    scale = {"fp8_channel": "fp8", "fp8_block128": "fp8_block128"}[scheme]
    rounded = load_decoder(resolve(str(base)), quantization=scale)
    pool, matrix = AdapterPool(rounded.weights, 1), rounded.weights.layers[1].mlp.down
    assert matrix.scheme == scheme
    pool.put(0, load(make_adapter(base, tmp_path / "adapter"), rounded))
    x, [section] = torch.randn(3, matrix.shape[1]), pool._adapter(0).layers[1]["down"]
    ours = pool.products(rounded.products, np.array([0, -1, 0])).linear(x, matrix)
    want = rounded.products.linear(x, matrix)
    want[[0, 2]] += x[[0, 2]] @ section.a.T @ section.b.T
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adapters_in_sixteen_bits(dtype, decoder, base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter", dtype=dtype)
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(20)
    pool.put(0, load(adapter, decoder))
    want = alone(merged(base, adapter, tmp_path / "merged"), tokens)
    alike(run(decoder, pool, [tokens], [0])[0], want)


def test_parts_of_two_ranks_add_up(decoder, base, tmp_path):
    """A product's columns are cut in B, a sum's in A; q, k and v each keep their own places."""
    path = make_adapter(base, tmp_path / "adapter", rank=4)
    whole = load(path, decoder)
    shards = [Shard(decoder.spec, rank, 2) for rank in range(2)]
    parts = [read_adapter(path, shard, decoder.dtype) for shard in shards]
    pairs = zip(parts[0].layers, parts[1].layers, strict=True)
    x, inner = torch.randn(3, decoder.spec.q_size), decoder.spec.q_size // 2
    for layer, (one, two) in zip(whole.layers, pairs, strict=True):
        [o], [left], [right] = layer["o"], one["o"], two["o"]
        sums = x[:, :inner] @ left.a.T @ left.b.T + x[:, inner:] @ right.a.T @ right.b.T
        torch.testing.assert_close(sums, x @ o.a.T @ o.b.T)
        for kind, count in (("qkv", 3), ("gate_up", 2)):
            assert len(layer[kind]) == count
            for section, left, right in zip(layer[kind], one[kind], two[kind], strict=True):
                assert torch.equal(section.b, torch.cat([left.b, right.b]))
                assert left.columns == right.columns
                assert left.columns.start == section.columns.start // 2


def test_a_file_that_changes_later_changes_nothing(decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    section = load(path, decoder).layers[0]["o"][0]
    before = section.a.clone()
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 100_000)
    assert torch.equal(section.a, before)


def rewritten(path, change):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


Q = "base_model.model.model.layers.0.self_attn.q_proj"

DAMAGE = {
    "lacks lora_B": lambda t: t.pop(f"{Q}.lora_B.weight"),
    "lacks lora_A": lambda t: t.pop(f"{Q}.lora_A.weight"),
    r"q_proj has A \[8, 63\]": lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 63)}),
    r"and B \[64, 8\]": lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(64, 8)}),
    "rank 4, and adapter_config.json says 8": lambda t: t.update(
        {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(128, 4)}
    ),
    "NaN or infinite": lambda t: t[f"{Q}.lora_B.weight"].fill_(torch.nan),
    "q_proj has numbers that are NaN": lambda t: t[f"{Q}.lora_A.weight"][0, 0].fill_(torch.inf),
    "lora_magnitude_vector": lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(128)}),
    "lora_embedding_A": lambda t: t.update(
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 256)}
    ),
    "no module lm_head": lambda t: t.update(
        {f"base_model.model.lm_head.lora_{e}.weight": torch.ones(8, 8) for e in "AB"}
    ),
    r"no module model\.layers\.2\.": lambda t: t.update(
        {Q.replace(".0.", ".2.") + f".lora_{e}.weight": torch.ones(8, 8) for e in "AB"}
    ),
    r"experts\.0": lambda t: t.update(
        {
            f"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_{e}.weight": torch.ones(
                8, 8
            )
            for e in "AB"
        }
    ),
    "target_modules has q_proj": lambda t: [t.pop(n) for n in list(t) if "q_proj" in n],
    "no tensors": lambda t: t.clear(),
    "is torch.int32": lambda t: t.update(
        {f"{Q}.lora_A.weight": torch.ones(8, 64, dtype=torch.int32)}
    ),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damaged_tensors_are_named(problem, decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    rewritten(path, DAMAGE[problem])
    with pytest.raises(AdapterError, match=problem):
        load(path, decoder)


CONFIGS = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "target_parameters": ["mlp.experts.up_proj"],
    "layer_replication": [[0, 2]],
    "lora_bias": True,
    "use_qalora": True,
    "alora_invocation_tokens": [1, 2],
    "loftq_config": {"loftq_bits": 4},
    "something_new": 1,
    "fan_in_fan_out": True,
    "bias": "all",
    "peft_type": "IA3",
    "init_lora_weights": "pissa",
    "rank_pattern": {"(a+)+b": 4, ".*.*.*.*a": 4},
    "alpha_pattern": {"[": 4},
    "lora_alpha": "many",
    "r": None,
    "target_modules": ["q_proj", "embed_tokens"],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_what_a_config_asks_beyond_is_refused_by_name(field, decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter", config={field: CONFIGS[field]})
    with pytest.raises(AdapterError, match=field if field != "r" else "`r`"):
        load(path, decoder)


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "alpha_pattern"])
def test_more_names_of_modules_than_any_model_has_are_refused(field, decoder, base, tmp_path):
    """Each is compared with every module: millions of them kept the server's only reader of
    adapters for hours."""
    names = [f"other.{i}" for i in range(4097)]
    given = names if field == "target_modules" else dict.fromkeys(names, 2)
    path = make_adapter(base, tmp_path / "adapter", config={field: given})
    with pytest.raises(AdapterError, match=f"{field} has more than 4096 names"):
        load(path, decoder)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "patterns",
    [["(|.)" * 40 + "x"], ["(|.|..)(|.|..)(|.|..).*.*.*x"] * 5, [".*.*(" + "|." * 2000 + ")x"]],
)
def test_patterns_that_may_be_tried_in_very_many_ways_are_refused(
    field, patterns, decoder, base, tmp_path
):
    """One of 80 characters would keep the server's only reader of adapters for hours."""
    given = {f"{pattern}{i}": 2 for i, pattern in enumerate(patterns)}
    path = make_adapter(base, tmp_path / "adapter", config={field: given})
    with pytest.raises(AdapterError, match=f"{field} has too many alternatives"):
        load(path, decoder)


LAYERS = "|".join(map(str, range(80)))


@pytest.mark.parametrize(
    "pattern",
    [
        "^model.decoder.layers.0.encoder_attn.k_proj",
        r".*\.1\..*down_proj",
        rf"model\.layers\.({LAYERS})\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        rf".*\.layers\.({LAYERS})\..*\.(q|k|v|o|gate|up|down)_proj",
    ],
)
def test_patterns_as_people_write_them_are_taken(pattern, decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter", config={"rank_pattern": {pattern: 4}}, rank=4)
    assert load(path, decoder).layers


def test_fields_that_are_empty_or_without_effect_are_taken(decoder, base, tmp_path):
    config = {
        **{"use_dora": False, "modules_to_save": None, "loftq_config": {}, "rank_pattern": None},
        **{"layers_to_transform": [1], "lora_dropout": 0.1, "megatron_core": "megatron.core"},
        "something_new": [],
        "target_modules": [*(module.rpartition(".")[2] for module in MODULES), "c_attn"],
    }
    path = make_adapter(base, tmp_path / "adapter", layers=[1], config=config)
    assert load(path, decoder).layers[0] == {}


def test_a_rank_beyond_the_pools_is_refused(decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter", rank=17)
    with pytest.raises(AdapterError, match="rank 17: the most that is served here is 16"):
        load(path, decoder, max_rank=16)


def test_an_adapter_of_another_model_is_refused(decoder, tmp_path):
    other = make_checkpoint("llama2", tmp_path / "other", layers=2)
    with pytest.raises(AdapterError, match="this base model wants"):
        load(make_adapter(other, tmp_path / "adapter"), decoder)


@pytest.mark.parametrize(
    "module", ["mlp.experts.0.up_proj", "mlp.gate", "mlp.shared_experts.up_proj"]
)
def test_adapters_of_experts_are_refused(module, tmp_path):
    base = make_checkpoint("glm4-moe", tmp_path / "moe", layers=2)
    path = make_adapter(base, tmp_path / "adapter", modules=["self_attn.o_proj"])
    tensors = load_file(path / "adapter_model.safetensors")
    for end, shape in (("A", (8, 64)), ("B", (32, 8))):
        name = f"base_model.model.model.layers.1.{module}.lora_{end}.weight"
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match=f"{module} for adapters, which experts, routers and"):
        load(path, load_decoder(resolve(str(base))))


def test_folders_that_are_no_adapters_are_refused(decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    with pytest.raises(AdapterError, match="is no directory"):
        load(tmp_path / "nothing", decoder)
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        load(base, decoder)
    tensors = path / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        load(path, decoder)
    tensors.rename(path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        load(path, decoder)


def test_a_file_that_is_cut_off_while_it_is_read_ends_nothing(decoder, base, tmp_path, monkeypatch):
    """One that is mapped would end the process by SIGBUS: a trainer that saves cuts files off."""
    path = make_adapter(base, tmp_path / "adapter")
    found = peft._found

    def cut_off(*args):
        (path / "adapter_model.safetensors").write_bytes(b"")
        return found(*args)

    whole = load(path, decoder)
    monkeypatch.setattr(peft, "_found", cut_off)
    assert load(path, decoder).nbytes == whole.nbytes
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        load(path, decoder)


def test_only_files_of_the_digest_that_was_asked_for_are_read(decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    digest = digest_of(path)
    assert load(path, decoder, digest=digest).rank
    rewritten(path, lambda tensors: tensors[f"{Q}.lora_A.weight"].fill_(0.5))
    with pytest.raises(AdapterError, match="have changed"):
        load(path, decoder, digest=digest)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(name, decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero")):
        (path / name).unlink()
        make(path / name)
        assert digest_of(path) is None
        with pytest.raises(AdapterError, match=f"has no {name}"):
            load(path, decoder)


def test_a_file_that_is_larger_than_any_adapter_is_not_read(decoder, base, tmp_path):
    path = make_adapter(base, tmp_path / "adapter")
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(AdapterError, match="has more than"):
        load(path, decoder)


@pytest.mark.parametrize(
    ("family", "start"),
    [
        *(("qwen3", "gaussian"), ("phi3", "mica"), ("glm4", "eva"), ("mellum", True)),
        *(("gemma3", True), ("gemma4-moe", True), ("gemma4-inputs", True)),
        ("gemma4-unified", True),
    ],
)
def test_logits_are_those_of_peft(family, start, tmp_path):
    """An adapter that PEFT has made and saved, with all that it writes into the config."""
    peft = pytest.importorskip("peft")
    from .checkpoints import reference

    base = make_checkpoint(family, tmp_path / "base", seed=1, layers=LISTED.get(family, 2))
    targets = TARGETS.get(family, "all-linear")
    config = peft.LoraConfig(
        r=6, lora_alpha=9, target_modules=targets, init_lora_weights=start,
        rank_pattern={"o_proj": 2}, alpha_pattern={r".*\.1\..*down_proj": 30}, use_rslora=True,
        exclude_modules=["model.layers.1.self_attn.o_proj"],
    )  # fmt: skip
    model = peft.get_peft_model(reference(base), config)
    random = torch.Generator().manual_seed(5)
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.data.normal_(std=0.4, generator=random)
    model.save_pretrained(tmp_path / "adapter")
    decoder = load_decoder(resolve(str(base)))
    pool, tokens = AdapterPool(decoder.weights, 1), prompt(40)
    pool.put(0, load(tmp_path / "adapter", decoder))
    want = model(tokens[None]).logits[0].float()
    alike(run(decoder, pool, [tokens], [0])[0], want)
    assert (want - alone(decoder, tokens)).abs().max() > 1.0


def test_eight_adapters_in_one_batch_are_those_of_peft(decoder, base, tmp_path):
    """Each module alone, and all of them, with ranks of 1 to 64; in one pass with the base model's
    own rows."""
    peft = pytest.importorskip("peft")
    from .checkpoints import reference

    modules = [module.rpartition(".")[2] for module in MODULES]
    targets = {**{f"only-{module}": [module] for module in modules}, "all": modules}
    ranks = zip(targets, (1, 2, 5, 8, 16, 33, 64, 12), strict=True)
    configs = {n: peft.LoraConfig(r=rank, target_modules=targets[n]) for n, rank in ranks}
    first, *others = configs
    model = peft.get_peft_model(reference(base), configs[first], first)
    for name in others:
        model.add_adapter(name, configs[name])
    random = torch.Generator().manual_seed(5)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            each.data.normal_(generator=random)
    model.save_pretrained(tmp_path)
    pool, sequences = AdapterPool(decoder.weights, 8), [prompt(9 + i, seed=i) for i in range(9)]
    for slot, name in enumerate(configs):
        pool.put(slot, load(tmp_path / name, decoder))
    ours = run(decoder, pool, sequences, [*range(8), -1])
    for name, tokens, logits in zip(configs, sequences, ours, strict=False):
        model.set_adapter(name)
        alike(logits, model(tokens[None]).logits[0].float())
    assert torch.equal(ours[8], alone(decoder, sequences[8]))
