"""Tiny GGUF files, written as llama.cpp's converter writes them, load as their checkpoints do."""

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFEndian, GGUFReader, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import load_decoder
from twolane.model.families.registry import FAMILIES, GGUF_ARCHITECTURES
from twolane.model.load.configs import facts_from_directory
from twolane.model.load.gguf import GGUFModel, hugging_face_stems
from twolane.model.load.hub import resolve
from twolane.model.rope import frequencies
from twolane.model.spec import UnsupportedModel

from .checkpoints import TINY_CONFIGS, make_checkpoint
from .passes import close, in_chunks, prompt

PER_LAYER = {"attention.head_count": 4, "attention.head_count_kv": 4, "feed_forward_length": 96}
"""Keys that a file may give as a list, and what they are for the smallest Llama."""


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute` of rotary rows (convert_hf_to_gguf.py)."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(checkpoint, file, architecture, kind, *, fields=(), tensors=()):
    """Convert a checkpoint; its own weights are replaced by what the quantisation leaves."""
    spec = facts_from_directory(checkpoint).spec
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.rope.rotated or spec.head_dim)
    writer.add_eos_token_id(2)
    found = (architecture, spec.moe is not None)
    family = GGUF_ARCHITECTURES.get(found, FAMILIES["llama"])
    names = {stem: name for name, stem in hugging_face_stems(family, spec.layers).items()}
    for name, *arguments in fields:
        getattr(writer, name)(*arguments)
    loaded = load_file(checkpoint / "model.safetensors")
    own_names = {family.usual_name(name): name for name in loaded}
    weights = {name: loaded[own] for name, own in own_names.items()}
    for name, values in merged(spec, family, weights).items():
        raw = quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        back = torch.from_numpy(dequantize(raw, kind).copy())
        unmerge(family, weights, name, back)
    alone = [name for name in weights if family.experts.expert.split("{")[0] not in name]
    for name in alone:
        values = weights[name].numpy()
        values = values + 1 if family.norms_less_1 and name.endswith("norm.weight") else values
        heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}.get(name.split(".")[-2])
        permuted = family.gguf.permuted and heads is not None
        values = interleave(values, heads) if permuted else values
        used = kind if values.ndim == 2 else Type.F32
        raw = quantize(values, used)
        stem, suffix = name.removesuffix("_bias"), "bias"
        stem = name if stem not in names else stem
        if not name.endswith(("correction_bias", "expert_bias")):
            stem, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names[stem]}.{suffix}", raw.squeeze(), raw_dtype=used)
        if family.norms_less_1 and name.endswith("norm.weight"):
            continue
        back = torch.from_numpy(dequantize(raw, used).copy())
        if permuted:
            back = back.view(heads, -1, 2, *back.shape[1:]).transpose(1, 2).reshape(back.shape)
        weights[name] = back.contiguous()
    for name, values in tensors:
        writer.add_tensor(name, values)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    weights = {own_names[name]: tensor for name, tensor in weights.items()}
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})


PARTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def merged(spec, family, weights):
    """The experts of each layer as one tensor for each part, under the names of GGUF files."""
    if spec.moe is None:
        return {}
    found, names = {}, family.experts
    for i in filter(spec.has_experts, range(spec.layers)):
        for part, name in PARTS.items():
            each = f"model.layers.{i}.{names.expert}.{getattr(names, part)}.weight"
            stack = [weights[each.format(number)] for number in range(spec.moe.experts)]
            found[f"blk.{i}.{name}.weight"] = torch.stack(stack).numpy()
    return found


def unmerge(family, weights, name, stack):
    """Put what a tensor of `merged` became in the place of the experts that it was made of."""
    _, layer, stem, _ = name.split(".")
    part = next(part for part, each in PARTS.items() if each == stem)
    each = f"model.layers.{layer}.{family.experts.expert}.{getattr(family.experts, part)}.weight"
    for number, expert in enumerate(stack):
        weights[each.format(number)] = expert.contiguous()


def same(checkpoint, file):
    tokens = prompt(70)
    want = in_chunks(load_decoder(resolve(str(checkpoint))), tokens, [70])
    close(in_chunks(load_decoder(resolve(str(file))), tokens, [60, *[1] * 10]), want)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_1])
@pytest.mark.parametrize(
    ("family", "architecture"), [("llama2", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_every_type_of_every_architecture(tmp_path, family, architecture, kind):
    checkpoint, file = make_checkpoint(family, tmp_path / "model", seed=4), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, architecture, kind)
    spec = GGUFModel(file).spec
    assert spec.family == architecture
    assert spec.tie_embeddings == (family == "qwen3")
    assert spec.eos_token_ids == (2,)
    same(checkpoint, file)


@pytest.mark.parametrize("fields", [(), (("add_attention_scale", 0.0),)])
def test_factors_that_a_granite_file_leaves_out_change_nothing(tmp_path, fields):
    checkpoint, file = make_checkpoint("granite", tmp_path / "model", seed=4), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, "granite", Type.F32, fields=fields)
    spec = GGUFModel(file).spec
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (1.0, 1.0, 1.0)
    assert spec.attention_scale is None


ARCHITECTURE = {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}


def keys_of(spec):
    """Keys that a file has besides those of all models."""
    keys, rope = [], spec.rope
    if window := next((kind.window for kind in spec.kinds if kind.window), None):
        keys.append(("add_sliding_window", window))
        pattern = [kind.window is not None for kind in spec.kinds]
        if spec.family != "mistral":
            keys.append(("add_sliding_window_pattern", pattern))
    if spec.attention_scale is not None and not spec.norms_outputs:
        keys += [("add_attention_scale", spec.attention_scale)]
        keys += [("add_embedding_scale", spec.embedding_scale)]
        keys += [("add_residual_scale", spec.residual_scale)]
        keys += [("add_logit_scale", 1.0 / spec.logit_scale)]
    if rope.type == "longrope":
        keys.append(("add_rope_scaling_orig_ctx_len", rope.original_positions))
        keys.append(("add_rope_scaling_attn_factors", rope.attention_factor))
    if rope.type == "yarn":
        keys.append(("add_rope_scaling_type", RopeScalingType.YARN))
        keys.append(("add_rope_scaling_factor", rope.factor))
        keys.append(("add_rope_scaling_orig_ctx_len", rope.original_positions))
    if rope.type == "linear":
        keys.append(("add_rope_scaling_type", RopeScalingType.LINEAR))
        keys.append(("add_rope_scaling_factor", rope.factor))
    if rope.query_beta:
        keys.append(("add_attn_temperature_scale", rope.query_beta))
        keys.append(("add_rope_scaling_yarn_log_mul", 1.0))
    if spec.convolution is not None:
        listed = [0 if spec.is_linear(i) else spec.kv_heads for i in range(spec.layers)]
        keys.append(("add_shortconv_l_cache", spec.convolution.taps))
        keys.append(("add_array", f"{ARCHITECTURE[spec.family]}.attention.head_count_kv", listed))
    if (moe := spec.moe) is not None:
        keys.append(("add_expert_count", moe.experts))
        keys.append(("add_expert_used_count", moe.per_token))
        if spec.family == "glm4_moe":
            keys.append(("add_expert_weights_norm", moe.normalised))
            keys.append(("add_expert_weights_scale", moe.scale))
    return keys


FILES = {
    **{"olmo3": "olmo2", "ministral3": "mistral3", "qwen3": "qwen3vl", "qwen3-moe": "qwen3vlmoe"},
    **{"phi4-mini": "phi3", "glm4-moe-normed": "glm4moe", "qwen2": "qwen2vl"},
}
"""Fixtures beside the first of each family, and the architectures of their files."""
AS_IN_FILES = {
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen3-moe": {"mlp_only_layers": []},
    "gemma3": {"query_pre_attn_scalar": 32},
}
"""What files cannot say, and llama.cpp has in its code."""


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        (next(iter(TINY_CONFIGS[each.name])), name)
        for (name, _), each in GGUF_ARCHITECTURES.items()
        if name not in (*FILES.values(), "gemma4", "gpt-oss")
        or name in ("olmo2", "phi3", "glm4moe")
    ]
    + [*FILES.items()],
)
def test_every_architecture(tmp_path, family, architecture):
    sizes = AS_IN_FILES.get(family)
    checkpoint = make_checkpoint(family, tmp_path / "model", seed=4, sizes=sizes)
    file, spec = tmp_path / "m.gguf", facts_from_directory(checkpoint).spec
    tensors = [
        (f"rope_factors_{name}.weight", np.array(values, dtype=np.float32))
        for name, values in (("long", spec.rope.divisors), ("short", spec.rope.short_divisors))
        if values
    ]
    write_gguf(checkpoint, file, architecture, Type.F32, fields=keys_of(spec), tensors=tensors)
    found = GGUFModel(file).spec
    assert found.family == {"olmo3": "olmo2"}.get(spec.family, spec.family)
    assert found.kinds == spec.kinds
    assert found.moe == spec.moe
    assert found.rope.rotated == spec.rope.rotated
    same(checkpoint, file)


def test_experts_are_read_one_by_one(tmp_path):
    """Of blocks of numbers, with gate and up in one tensor, as newer files may have them."""
    sizes = AS_IN_FILES["qwen3-moe"]
    checkpoint = make_checkpoint("qwen3-moe", tmp_path / "model", seed=4, sizes=sizes)
    file, spec = tmp_path / "m.gguf", facts_from_directory(checkpoint).spec
    write_gguf(checkpoint, file, "qwen3moe", Type.Q8_0, fields=keys_of(spec))
    same(checkpoint, file)
    written, joined = GGUFReader(file), tmp_path / "joined.gguf"
    tensors = {tensor.name: tensor for tensor in written.tensors}
    writer = GGUFWriter(joined, "qwen3moe")
    for name, field in written.fields.items():
        if name.startswith("qwen3moe."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, tensor in tensors.items():
        data = tensor.data
        if "_up_exps" in name:
            continue
        if "_gate_exps" in name:
            data = np.concatenate([data, tensors[name.replace("gate", "up")].data], axis=1)
        writer.add_tensor(
            name.replace("gate_exps", "gate_up_exps"), data, raw_dtype=tensor.tensor_type
        )
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    same(checkpoint, joined)


def test_frequency_factors(tmp_path):
    """Llama 3.1 files carry the stretched frequencies as divisors."""
    checkpoint, file = make_checkpoint("llama31", tmp_path / "model", seed=4), tmp_path / "m.gguf"
    spec = facts_from_directory(checkpoint).spec
    plain = spec.rope.theta ** -(torch.arange(0, 16, 2) / 16)
    divisors = (plain / frequencies(spec.rope, 16)).numpy()
    write_gguf(checkpoint, file, "llama", Type.F32, tensors=[("rope_freqs.weight", divisors)])
    same(checkpoint, file)


def test_frequency_factors_beside_a_scaling(tmp_path):
    """Positions are divided by both, as in llama.cpp; with YaRN they are refused."""
    checkpoint, file = (
        make_checkpoint("llama-bias", tmp_path / "model", seed=4),
        tmp_path / "m.gguf",
    )
    tensors = [("rope_freqs.weight", np.full(8, 0.5, np.float32))]
    linear = [("add_rope_scaling_type", RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)]
    write_gguf(checkpoint, file, "llama", Type.F32, fields=linear, tensors=tensors)
    same(checkpoint, file)
    yarn = [("add_rope_scaling_type", RopeScalingType.YARN), ("add_rope_scaling_factor", 4.0)]
    write_gguf(checkpoint, file, "llama", Type.F32, fields=yarn, tensors=tensors)
    with pytest.raises(UnsupportedModel, match=r"rope scaling beside rope_freqs\.weight 'yarn'"):
        load_decoder(resolve(str(file)))


def test_linear_scaling_and_biases(tmp_path):
    checkpoint = make_checkpoint("llama-bias", tmp_path / "model", seed=4)
    file = tmp_path / "m.gguf"
    fields = [
        ("add_rope_scaling_type", RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 2.0),
    ]
    write_gguf(checkpoint, file, "llama", Type.F32, fields=fields)
    same(checkpoint, file)


@pytest.mark.parametrize(
    ("kind", "factor", "kept"),
    [(None, 2.0, ("linear", 2.0)), (RopeScalingType.NONE, 2.0, ("default", 1.0))]
    + [(kind, 0.0, ("default", 1.0)) for kind in (None, RopeScalingType.LINEAR)],
)
def test_factors_count_as_in_llama_cpp(tmp_path, kind, factor, kept):
    """One alone is linear, one of 0 is none, and one beside "none" does not count."""
    checkpoint, file = make_checkpoint("llama2", tmp_path / "model"), tmp_path / "m.gguf"
    kinds = [] if kind is None else [("add_rope_scaling_type", kind)]
    fields = [*kinds, ("add_rope_scaling_factor", factor)]
    write_gguf(checkpoint, file, "llama", Type.F32, fields=fields)
    rope = GGUFModel(file).spec.rope
    assert (rope.type, rope.factor) == kept


def test_yarn(tmp_path):
    """After llama.cpp#13322."""
    checkpoint = make_checkpoint("qwen3-yarn", tmp_path / "model", seed=4)
    file, spec = tmp_path / "m.gguf", facts_from_directory(checkpoint).spec
    fields = [
        ("add_rope_scaling_type", RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 256),
    ]
    write_gguf(checkpoint, file, "qwen3", Type.F32, fields=fields)
    found = GGUFModel(file).spec
    assert found.rope == spec.rope
    assert found.max_positions == spec.max_positions
    same(checkpoint, file)


def test_yarn_needs_but_its_factor(tmp_path):
    checkpoint, file = make_checkpoint("qwen2", tmp_path / "model"), tmp_path / "m.gguf"
    fields = [
        ("add_rope_scaling_type", RopeScalingType.YARN),
        ("add_rope_scaling_factor", 2.0),
        ("add_rope_scaling_attn_factors", 0.5),
        ("add_rope_scaling_yarn_beta_fast", 16.0),
    ]
    write_gguf(checkpoint, file, "qwen2", Type.F32, fields=fields)
    spec = GGUFModel(file).spec
    assert spec.rope.original_positions == 1024
    assert spec.max_positions == 2048
    assert spec.rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(2.0) + 1.0))
    assert (spec.rope.beta_fast, spec.rope.beta_slow) == (16.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("add_rope_scaling_factor", -2.0)], "rope factor must be above 0 and finite, not -2"),
        ([("add_rope_scaling_factor", math.nan)], "rope factor must be above 0 and finite"),
        (
            [
                ("add_rope_scaling_type", RopeScalingType.YARN),
                ("add_rope_scaling_factor", 2.0),
                ("add_rope_scaling_orig_ctx_len", 0),
            ],
            "original_context_length must be 1 or more, not 0",
        ),
    ],
)
def test_numbers_by_which_nothing_can_be_rotated_are_refused(tmp_path, fields, message):
    checkpoint, file = make_checkpoint("qwen2", tmp_path / "model"), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, "qwen2", Type.F32, fields=fields)
    with pytest.raises(ValueError, match=message):
        _ = GGUFModel(file).spec


def test_lists_that_say_the_same_for_all_layers(tmp_path):
    checkpoint, file = make_checkpoint("llama2", tmp_path / "model", seed=4), tmp_path / "m.gguf"
    lists = [("add_array", f"llama.{name}", [n] * 4) for name, n in PER_LAYER.items()]
    write_gguf(checkpoint, file, "llama", Type.F32, fields=lists)
    same(checkpoint, file)


def test_a_suffix_in_capitals(tmp_path):
    checkpoint, file = make_checkpoint("llama2", tmp_path / "model", seed=4), tmp_path / "M.GGUF"
    write_gguf(checkpoint, file, "llama", Type.F32)
    same(checkpoint, file)


def split(file, count):
    """Write the tensors of a file over several, as llama-gguf-split does; return their names."""
    whole = GGUFReader(file)
    parts = [file.with_name(f"m-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    for number, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", number)
        for name, field in whole.fields.items() if number == 0 else ():
            if name.startswith("llama.") or name == "tokenizer.ggml.eos_token_id":
                writer.add_key_value(name, field.contents(), field.types[0])
        for place, tensor in enumerate(whole.tensors):
            if place * count // len(whole.tensors) == number:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for step in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{step}_to_file")()
        writer.close()
    file.unlink()
    return parts


def test_a_model_in_several_files_is_named_by_the_first(tmp_path):
    checkpoint = make_checkpoint("llama2", tmp_path / "model", seed=4)
    write_gguf(checkpoint, tmp_path / "m.gguf", "llama", Type.Q8_0)
    parts = split(tmp_path / "m.gguf", 3)
    same(checkpoint, parts[0])
    with pytest.raises(ValueError, match="not the first of the model's 3 files"):
        GGUFModel(parts[1])
    renamed = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="one of 3 files of a model, which must be named"):
        GGUFModel(renamed)
    renamed.rename(parts[0])
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"lacks m-00003-of-00003\.gguf"):
        GGUFModel(parts[0])


def test_sliding_window(tmp_path):
    checkpoint, file = make_checkpoint("mistral", tmp_path / "model", seed=4), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, "llama", Type.F32, fields=[("add_sliding_window", 24)])
    same(checkpoint, file)


def test_a_vocabulary_is_stepped_over(tmp_path):
    """Lists of thousands, of strings and of numbers, of which what lies behind them depends."""
    words = [f"{'long ' * (i % 7)}{i}" for i in range(2000)]
    fields = [
        ("add_token_list", words),
        ("add_token_scores", [0.5] * 2000),
        ("add_token_types", [1] * 2000),
        ("add_token_merges", words),
        ("add_eot_token_id", 7),
    ]
    checkpoint, file = make_checkpoint("llama2", tmp_path / "model", seed=4), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, "llama", Type.Q8_0, fields=fields)
    assert GGUFModel(file).spec.eos_token_ids == (2, 7)
    same(checkpoint, file)
    whole = file.read_bytes()
    word, scores = whole.index(b"long 1000"), whole.index(b"tokenizer.ggml.scores")
    endless = whole[: word - 30] + b"\xff" * 20 + whole[word - 10 :]
    for content in (whole[:word], whole[: scores + 99], endless):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf is not a whole GGUF file"):
            GGUFModel(file)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("gemma2", [], "GGUF architecture 'gemma2': soft caps of scores and logits"),
        ("qwen2", [("add_causal_attention", False)], "attention.causal 'false'"),
        ("qwen2", [("add_expert_count", 8)], "number of experts 8"),
        ("qwen3moe", [], "number of experts 0"),
        ("llama", [("add_final_logit_softcapping", 30.0)], "final_logit_softcapping 30.0"),
        ("llama", [("add_causal_attention", False)], "attention.causal 'false'"),
        (
            "llama",
            [("add_rope_scaling_type", RopeScalingType.LONGROPE)],
            "GGUF rope scaling 'longrope'; these work: none, linear, yarn",
        ),
        (
            "llama",
            [("add_array", "llama.attention.head_count_kv", [4, 4, 2, 4])],
            r"head_count_kv \[4, 4, 2, 4\]; these work: one value for all layers",
        ),
        ("llama", [("add_rope_dimension_count", 8)], "rope.dimension_count 8; these work: 16"),
    ],
)
def test_refused_by_name(tmp_path, architecture, fields, message):
    checkpoint, file = make_checkpoint("llama2", tmp_path / "model"), tmp_path / "m.gguf"
    write_gguf(checkpoint, file, architecture, Type.F32, fields=fields)
    with pytest.raises(UnsupportedModel, match=message):
        load_decoder(resolve(str(file)))


def test_another_byte_order_is_refused(tmp_path):
    """As by llama.cpp: blocks of quantised numbers would be read as other ones."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.add_token_list(["word"] * 2000)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    with pytest.raises(ValueError, match="is big-endian; gguf-convert-endian makes it little"):
        GGUFModel(tmp_path / "m.gguf")


def test_broken_files_are_refused(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(make_checkpoint("llama2", tmp_path / "model"), file, "llama", Type.F32)
    whole = file.read_bytes()
    for content in (b"", b"GGUF", b"not a model", whole[:300], whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf is not a whole GGUF file"):
            load_decoder(resolve(str(file)))
