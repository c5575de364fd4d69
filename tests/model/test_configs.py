import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twolane.model.families.registry import ARCHITECTURES
from twolane.model.load.configs import (
    facts_from_directory,
    sampling_from_directory,
    spec_from_config,
)
from twolane.model.load.quantization_configs import read_quantization
from twolane.model.rope import frequencies, rotation
from twolane.model.shapes import SHAPES, with_all_kinds
from twolane.model.spec import UNROTATED, RopeSpec, UnsupportedModel

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "codellama-34b": 33_743_970_304,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "glm-4.5-air": 106_852_251_264,
    "gemma-3-27b": 27_009_346_304,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2-135m-instruct": 134_515_008,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.6-27b": 26_895_998_464,
}
"""Parameters that the models' safetensors files hold; of the last three, those of the text part
alone, without layers that predict further tokens."""


LOW_AND_HIGH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def unrotated(spec):
    """The layers whose queries and keys are not rotated."""
    return [i for i in range(spec.layers) if spec.rope_of(i) == UNROTATED]


def named(config, architecture):
    """The content of a config's file."""
    return {**config.to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_size(name):
    assert SHAPES[name].parameters == PUBLISHED[name]


def test_kinds_of_a_shape_are_repeated_until_each_layer_has_one():
    table = {"layers": 5, "kinds": [{"window": 128}, {}]}
    assert with_all_kinds(table)["kinds"] == [{"window": 128}, {}] * 2 + [{"window": 128}]
    assert with_all_kinds({"layers": 5})["kinds"] == []


def test_kv_bytes_per_token():
    assert SHAPES["llama-3.1-8b"].kv_bytes_per_token(2) == 131_072


def test_qwen2_ignores_a_window_that_is_off():
    config = named(Qwen2Config(use_sliding_window=False, sliding_window=100), "Qwen2ForCausalLM")
    spec = spec_from_config(config)
    assert spec.window(0) is None


def test_windows():
    mistral = spec_from_config(
        named(MistralConfig(sliding_window=64, num_hidden_layers=2), "MistralForCausalLM")
    )
    assert [mistral.window(i) for i in range(2)] == [64, 64]
    qwen = Qwen3Config(
        use_sliding_window=True, sliding_window=32, max_window_layers=1, num_hidden_layers=3
    )
    assert [spec_from_config(named(qwen, "Qwen3ForCausalLM")).window(i) for i in range(3)] == [
        None,
        32,
        32,
    ]


@pytest.mark.parametrize(
    ("architecture", "more", "layers"),
    [
        ("MistralForCausalLM", {}, (0, 2)),
        ("MinistralForCausalLM", {"model_type": "ministral"}, (0, 2)),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 4}, ()),
        ("MixtralForCausalLM", {}, (0, 1, 2, 3)),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True}, (0, 1, 2, 3)),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, (0, 2)),
        ("Qwen3ForCausalLM", {}, ()),
        ("SmolLM3ForCausalLM", {}, (0, 2)),
    ],
)
def test_the_layers_with_a_window_are_those_of_transformers(architecture, more, layers):
    """Ministral is written as Mistral with `layer_types`."""
    types = ["sliding_attention", "full_attention"] * 2
    raw = {"sliding_window": 48, "num_hidden_layers": 4, "layer_types": types, **more}
    spec = spec_from_config({"architectures": [architecture], **raw})
    assert tuple(i for i in range(4) if spec.window(i)) == layers


def test_ministral_3_is_mistral_that_scales_queries():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0}
    rope |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
    raw = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    spec = spec_from_config({**raw, "rope_parameters": rope})
    assert (spec.family, spec.max_positions) == ("mistral", 262144)
    assert (spec.rope.query_beta, spec.rope.original_positions) == (0.1, 16384)
    assert (spec.head_dim, spec.window(0)) == (128, None)
    for wrong in ("much", -0.1):
        with pytest.raises(ValueError, match="llama_4_scaling_beta"):
            spec_from_config({**raw, "rope_parameters": {**rope, "llama_4_scaling_beta": wrong}})


def test_checkpoints_without_a_classifier_are_named_after_their_base():
    """As those of embeddings are (E5-Mistral)."""
    raw = {"architectures": ["MistralModel"], "model_type": "mistral"}
    assert spec_from_config(raw).family == "mistral"


def test_attention_to_later_tokens_is_refused():
    """As models of embeddings have it (GTE-Qwen2)."""
    raw = {"architectures": ["Qwen2ForCausalLM"], "is_causal": False}
    with pytest.raises(UnsupportedModel, match="is_causal False"):
        spec_from_config(raw)
    assert spec_from_config({**raw, "is_causal": None}).family == "qwen2"


def test_a_function_may_have_another_name():
    raw = {"architectures": ["Qwen2ForCausalLM"]}
    assert spec_from_config({**raw, "hidden_act": "swish"}) == spec_from_config(raw)


def test_end_tokens_of_both_configs_count(tmp_path):
    LlamaConfig(eos_token_id=[5, 6], architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert facts_from_directory(tmp_path).spec.eos_token_ids == (5, 6, 7)


def test_end_tokens_outside_the_vocabulary_are_none(tmp_path):
    LlamaConfig(vocab_size=8, eos_token_id=-1, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert facts_from_directory(tmp_path).spec.eos_token_ids == (7,)


def test_configs_written_before_rope_parameters(tmp_path):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert facts_from_directory(tmp_path).spec.rope == SHAPES["llama-3.1-8b"].rope
    raw["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert facts_from_directory(tmp_path).spec.rope == RopeSpec(500_000.0, "linear", 2.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 0.8,
            "beta_fast": 20,
            "beta_slow": 2,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_frequencies_are_those_of_transformers(scaling):
    config = Qwen3Config(
        head_dim=128,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 1e6, **scaling},
    )
    rope = spec_from_config(named(config, "Qwen3ForCausalLM")).rope
    want, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    torch.testing.assert_close(frequencies(rope, 128), want, rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(scale)


@pytest.mark.parametrize("positions", [2048, 4096, 4097, 16_384])
def test_a_dynamic_base_is_that_of_the_longest_sequence(positions):
    config = LlamaConfig(
        max_position_embeddings=4096, rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    )
    rope = spec_from_config(named(config, "LlamaForCausalLM")).rope
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=positions)
    torch.testing.assert_close(frequencies(rope, 128, positions), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0} | LOW_AND_HIGH,
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
    ],
)
def test_original_positions_of_the_config_itself_come_first(scaling):
    raw = {"model_type": "llama", "original_max_position_embeddings": 512}
    scaling = {**scaling, "original_max_position_embeddings": 1024}
    config = AutoConfig.for_model(**raw, rope_scaling=dict(scaling))
    config.standardize_rope_params()
    read = config.rope_parameters
    rope = spec_from_config({**raw, "rope_scaling": scaling}).rope
    assert rope.original_positions == read["original_max_position_embeddings"] == 512


def test_the_older_name_of_rope_parameters_may_say_what_is_rotated():
    raw = {"model_type": "phi3", "rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}
    assert spec_from_config(raw).rope.rotated == 48


def test_a_scaling_that_is_added_to_a_newer_config_leaves_the_base():
    newer = {"rope_theta": 7e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    for raw in ({}, {"rope_theta": 3e4}):
        both = {**raw, "model_type": "glm", "rope_parameters": newer, "rope_scaling": scaling}
        rope = spec_from_config(both).rope
        assert (rope.type, rope.theta, rope.factor, rope.rotated) == ("yarn", 7e4, 4.0, 64)
    own = {"model_type": "llama", "rope_parameters": {"rope_theta": 7e4}}
    own["rope_scaling"] = {**scaling, "rope_theta": 3e4}
    assert spec_from_config(own).rope.theta == 3e4


@pytest.mark.parametrize("positions", [4096, 4097])
def test_longrope_takes_one_of_two_lists_by_the_positions(positions):
    """The scale of attention follows from the positions of the config in both cases."""
    lists = {"short_factor": [1.0 + i / 8 for i in range(48)], "long_factor": [2.0] * 48}
    config = Phi3Config(
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **lists},
        pad_token_id=0,
    )
    spec = replace(spec_from_config(named(config, "Phi3ForCausalLM")), max_positions=positions)
    want, scale = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=positions)
    ours = rotation(spec, spec.rope)
    torch.testing.assert_close(ours.frequencies, want, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(ours.scales, torch.full((48,), scale))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 values for 36 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be 1 or more, not 0"),
    ],
)
def test_which_layers_are_rotated_must_be_said_of_each(raw, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config({"architectures": ["SmolLM3ForCausalLM"], **raw})


def test_smollm3_may_say_which_layers_are_rotated():
    raw = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    assert unrotated(spec_from_config(raw)) == [3]
    assert unrotated(spec_from_config({**raw, "no_rope_layers": [0, 1, 1, 0]})) == [0, 3]


def test_which_layers_have_a_window_must_be_said_of_each():
    raw = {"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(ValueError, match="layer_types has 2 values for 32 layers"):
        spec_from_config(raw)


def test_which_layers_have_experts_must_be_said():
    raw = {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}
    with pytest.raises(ValueError, match="decoder_sparse_step must be 1 or more, not 0"):
        spec_from_config(raw)


@pytest.mark.parametrize("shares", [{"attention_k_eq_v": True}, {"num_kv_shared_layers": 2}])
def test_gemma_4_has_no_biases_of_keys_that_are_shared(shares):
    raw = {"architectures": ["Gemma4ForCausalLM"], "attention_bias": True}
    with pytest.raises(UnsupportedModel, match="attention_bias True"):
        spec_from_config({**raw, **shares})
    assert spec_from_config({**raw, **shares, "attention_bias": False}).family == "gemma4_text"


@pytest.mark.parametrize("window", [0, -1, None])
def test_gemma_4_has_a_window(window):
    """Its layers with a window have heads of their own, so they cannot be layers without one."""
    with pytest.raises(ValueError, match=f"sliding_window must be 1 or more, not {window}"):
        spec_from_config({"architectures": ["Gemma4ForCausalLM"], "sliding_window": window})


@pytest.mark.parametrize("name", ["residual_multiplier", "logits_scaling", "attention_multiplier"])
def test_a_factor_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        spec_from_config({"architectures": ["GraniteForCausalLM"], name: 0})


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 4096}, 6144),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8192}, 40_960),
        ({"rope_type": "linear", "factor": 2.0}, 40_960),
    ],
)
def test_yarn_stretches_the_context(scaling, positions):
    """As with vLLM: Qwen's model cards tell to add it to a config that is otherwise as it was."""
    raw = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40_960}
    assert spec_from_config({**raw, "rope_scaling": scaling}).max_positions == positions


def test_yarn_of_deepseek_leaves_the_scale_of_attention_alone():
    """DeepSeek-R1-0528-Qwen3-8B's own factor undoes that of YaRN, as vLLM and llama.cpp have it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    raw = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 131_072}
    spec = spec_from_config({**raw, "rope_scaling": {**scaling, "attn_factor": 0.8782488562869419}})
    assert spec.rope.attention_factor == pytest.approx(1.0)


def test_gemma_4_has_layers_of_two_shapes():
    """E2B's config: the last layers read the keys and values of the last of their kind before."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    raw = {"architectures": ["Gemma4ForCausalLM"], "layer_types": kinds, "num_hidden_layers": 35}
    raw |= {"hidden_size": 1536, "num_key_value_heads": 1, "num_kv_shared_layers": 20}
    spec = spec_from_config({**raw, "use_double_wide_mlp": True})
    assert spec.kv_layers == list(range(15))
    assert [spec.kv_layer(i) for i in (0, 4, 15, 18, 19, 34)] == [0, 4, 13, 13, 14, 14]
    assert [spec.at(i).head_dim for i in (3, 4, 33, 34)] == [256, 512, 256, 512]
    assert [spec.at(i).intermediate_size for i in (14, 15)] == [9216, 18432]
    assert spec.kv_bytes_per_token(2) == 2 * 2 * (12 * 256 + 3 * 512)
    assert spec.kv_itemsize("fp8", 2) == 1 + 15 / (12 * 256 + 3 * 512)
    with pytest.raises(ValueError, match="num_kv_shared_layers must be 0 to 34, not 35"):
        spec_from_config({**raw, "num_kv_shared_layers": 35})
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention 'all'"):
        spec_from_config({**raw, "use_bidirectional_attention": "all"})
    with pytest.raises(ValueError, match="finds no keys and values"):
        spec_from_config({**raw, "num_kv_shared_layers": 32})


def test_attention_in_two_kinds_of_chunks_is_served_within_one():
    """Qwen2.5-7B-Instruct-1M: positions within a chunk are those of every attention."""
    chunks = {"chunk_size": 262_144, "local_size": 8192}
    raw = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 1_010_000}
    spec = spec_from_config({**raw, "dual_chunk_attention_config": chunks})
    assert spec.max_positions == 253_952


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            named(GemmaConfig(), "GemmaForCausalLM"),
            "'GemmaForCausalLM': of Gemma, the third and the fourth are built",
        ),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 5631},
            "width of the shared expert 5631; these work: multiples of moe_intermediate_size 1408",
        ),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "n_group": 8},
            "topk_group 1; these work: n_group 8",
        ),
        *(
            ({"model_type": "granitemoehybrid", "num_hidden_layers": 2, **fields}, message)
            for fields, message in (
                ({}, "layer_types 'mamba'; these work: attention"),
                ({"layer_types": ["attention", "mamba"]}, "layer_types 'mamba'"),
                ({"layer_types": ["attention"] * 2}, "num_local_experts 8; these work: 0"),
                (
                    {
                        "layer_types": ["attention"] * 2,
                        "num_local_experts": 0,
                        "position_embedding_type": "alibi",
                    },
                    "position_embedding_type 'alibi'; these work: rope, nope",
                ),
            )
        ),
        (
            {"architectures": ["MiMoV2ForCausalLM"]},
            "'MiMoV2ForCausalLM': heads whose keys and values differ in size are not built",
        ),
        (
            {"architectures": ["Llama4ForConditionalGeneration"]},
            "'Llama4ForConditionalGeneration': attention in chunks is not built",
        ),
        (
            {"architectures": ["FalconForCausalLM"]},
            "architecture 'FalconForCausalLM': LayerNorm is not built",
        ),
        (
            {"architectures": ["GPT9ForCausalLM"]},
            "architecture 'GPT9ForCausalLM'; these work: Ernie4_5ForCausalLM, "
            ".*LlamaForCausalLM, .*Qwen3ForCausalLM",
        ),
        (named(LlamaConfig(hidden_act="gelu"), "LlamaForCausalLM"), "activation 'gelu'"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "layer_types": ["linear_attention", "full_attention"],
            },
            "layer_types 'linear_attention'; these work: full_attention, sliding_attention",
        ),
        (
            named(
                LlamaConfig(rope_parameters={"rope_type": "proportional", "factor": 2.0}),
                "LlamaForCausalLM",
            ),
            "rope type 'proportional'; these work: default, linear, dynamic, llama3, yarn",
        ),
    ],
)
def test_refused_by_name(config, message):
    with pytest.raises(UnsupportedModel, match=message):
        spec_from_config(config)


TEXT_PARTS = [
    ("Qwen2VLForConditionalGeneration", transformers.Qwen2VLConfig),
    ("Qwen2_5_VLForConditionalGeneration", transformers.Qwen2_5_VLConfig),
    ("Qwen3VLForConditionalGeneration", transformers.Qwen3VLConfig),
    ("Qwen3VLMoeForConditionalGeneration", transformers.Qwen3VLMoeConfig),
]


@pytest.mark.parametrize(("architecture", "kind"), TEXT_PARTS)
def test_text_parts_have_the_defaults_of_transformers(architecture, kind):
    config = kind()
    whole = {**config.to_dict(), "architectures": [architecture]}
    bare = {"model_type": config.text_config.model_type}
    raw = {"model_type": kind.model_type, "architectures": [architecture], "text_config": bare}
    tied = {"tie_word_embeddings": config.tie_word_embeddings}
    assert spec_from_config({**raw, **tied}) == spec_from_config(whole)


def test_a_text_part_may_be_written_beside_what_reads_images():
    """As Qwen2.5-VL was published: its fields stand in the config itself."""
    text = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    name, kind = "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"
    raw = {"architectures": [name], "model_type": kind, "vision_config": {"hidden_size": 9}}
    flat = spec_from_config({**raw, **text, **rope})
    assert flat.kv_heads == 2
    assert flat == spec_from_config({**raw, "text_config": {**text, **rope}})
    with pytest.raises(UnsupportedModel, match=r"model_type of .* 'qwen3_vl'"):
        spec_from_config({**raw, "model_type": "qwen3_vl"})
    with pytest.raises(ValueError, match="text_config must be an object"):
        spec_from_config({**raw, "text_config": [1]})


def test_a_text_part_may_say_how_it_is_quantised(tmp_path):
    """As writers have it that quantise the text model alone, and then put it into the whole."""
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    name, found = "Qwen3VLForConditionalGeneration", []
    for raw in ({"quantization_config": stored}, {"text_config": {"quantization_config": stored}}):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **raw}))
        found.append(facts_from_directory(tmp_path).quantization)
    assert found[0] == found[1] == read_quantization(stored)


@pytest.mark.parametrize(
    ("architecture", "kind", "family"),
    [
        ("Qwen3_5ForCausalLM", "qwen3_5", "qwen3_5_text"),
        ("Gemma3Model", "gemma3", "gemma3_text"),
        (None, "qwen2_5_vl", "qwen2"),
    ],
)
def test_a_model_that_reads_images_may_have_another_architecture(architecture, kind, family):
    """That of its text part, or none, after a change; or its base, without a classifier."""
    raw = {"architectures": architecture and [architecture], "model_type": kind}
    spec = spec_from_config({**raw, "text_config": {"num_hidden_layers": 4}})
    assert (spec.family, spec.layers) == (family, 4)
    with pytest.raises(UnsupportedModel, match="SequenceClassification"):
        spec_from_config({**raw, "architectures": ["Gemma3ForSequenceClassification"]})


def test_embeddings_of_gemma_are_refused_by_their_field():
    raw = {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"}
    assert spec_from_config(raw).family == "gemma3_text"
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention True"):
        spec_from_config({**raw, "use_bidirectional_attention": True})


@pytest.mark.parametrize("more", [{}, {"quantization_config": {"bits": 4, "group_size": 64}}])
def test_mlx_is_refused_by_name(more):
    raw = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64}}
    with pytest.raises(UnsupportedModel, match="quantisation 'mlx'"):
        spec_from_config({**raw, **more})
    assert spec_from_config({**raw, "quantization": {}}).family == "llama"


def test_rotated_dimensions_have_two_names():
    """MiniMax M2 is published with the first, at first under another type."""
    raw = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128}
    spec = spec_from_config({**raw, "model_type": "minimax", "rotary_dim": 64})
    assert spec.rope.rotated == 64
    assert spec == spec_from_config({**raw, "partial_rotary_factor": 0.5, "attn_type_list": [1]})
    with pytest.raises(UnsupportedModel, match="attn_type_list 0"):  # of MiniMax-Text-01
        spec_from_config({"model_type": "minimax", "attn_type_list": [0, 0, 1]})


ROPES = (
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0} | LOW_AND_HIGH},
    {"rope_theta": 3e4, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}, "rope_scaling": None},
)
GEMMA_4 = "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"
MAY_BE_LEFT_OUT = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "eos_token_id": [7, 8],
    "use_sliding_window": True,
    "sliding_window": 48,
    "max_window_layers": 3,
    "layer_types": ["full_attention", "sliding_attention"] * 3,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.sets(st.sampled_from(list(MAY_BE_LEFT_OUT))),
    st.sampled_from(ROPES),
)
def test_what_a_config_leaves_out_is_as_in_transformers(architecture, said, rope):
    said = said - {"layer_types"} if "num_hidden_layers" not in said else said
    said |= {"head_dim"} if architecture == "Glm4MoeForCausalLM" else set()  # else it is odd
    raw = {name: MAY_BE_LEFT_OUT[name] for name in said} | copy.deepcopy(rope)
    # `transformers` gives Phi-3 no other stretching than its own, which is refused here.
    assume(architecture != "Phi3ForCausalLM" or "yarn" not in str(rope))
    assume(architecture != "Phi3ForCausalLM" or "rope_scaling" not in rope)
    # These have a rotation for each type of layers.
    by_type = ARCHITECTURES[architecture].config.ropes_by_type
    assume(not (rope and by_type))
    # Without inputs of each layer, for they are those of the default vocabulary.
    assume("vocab_size" not in said or architecture not in GEMMA_4)
    read = AutoConfig.for_model(ARCHITECTURES[architecture].name, **copy.deepcopy(raw)).to_dict()
    named = {"architectures": [architecture]}
    try:
        whole = spec_from_config(read | named)
    except ValueError:  # refused with all that is drawn stated, so nothing is left out wrongly
        reject()
    assert spec_from_config(raw | named) == whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architectures": ["MambaNextForCausalLM"]}, "'MambaNextForCausalLM'"),
        (
            {
                "architectures": ["LagunaForCausalLM"],
                "model_type": "laguna",
                "rope_scaling": {"a": 2},
            },
            "rope_scaling",
        ),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantisation 'exl2'"),
        ({"model_type": "mistral"}, "model_type of LlamaForCausalLM 'mistral'"),
        ({"hidden_size": "64 or so"}, r"hidden_size"),
        ({"hidden_size": 64.5}, r"hidden_size"),
        ({"hidden_size": 63, "num_attention_heads": 4}, "hidden_size 63 is no multiple"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"architectures": "LlamaForCausalLM"}, r"config\.json: .*architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, r"config\.json: .*architectures"),
        ({"quantization_config": "int8"}, r"config\.json: .*quantization_config"),
        ({"rope_scaling": {"type": "linear"}}, "have no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "have no 'factor'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "long_factor must have 64 numbers",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0, not 0"),
        ({"rope_scaling": {"type": "yarn", "factor": -4.0}}, "factor must be above 0, not -4"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0} | dict.fromkeys(LOW_AND_HIGH, 1.0)},
            "low_freq_factor 1.* must be below high_freq_factor 1",
        ),
        ({"rope_theta": -5}, "rope_theta must be above 1, not -5"),
        (
            {"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 0},
            "max_position_embeddings must be 1 or more, not 0",
        ),
        ({"rope_parameters": {"rope_theta": [1e4]}}, "rope_parameters: .*rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": "a"}}, "beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'full_attention'"),
    ],
)
def test_files_that_are_refused(tmp_path, wrong, message):
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **wrong}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        facts_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        *(({name: -1}, name) for name in ("vocab_size", "intermediate_size")),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": -1}, "kv_heads"),
        *(({"rms_norm_eps": value}, "norm_eps") for value in (-1.0, math.nan, math.inf)),
        ({"partial_rotary_factor": math.inf}, "partial_rotary_factor"),
        ({"rope_theta": math.inf}, "rope theta"),
        *(
            ({"model_type": "granite", field: value}, name)
            for value in (math.inf, math.nan)
            for field, name in (
                ("embedding_multiplier", "embedding_scale"),
                ("residual_multiplier", "residual_(scale|multiplier)"),
                ("attention_multiplier", "attention_(scale|multiplier)"),
                ("logits_scaling", "logit(_scale|s_scaling)"),
            )
        ),
    ],
)
def test_sizes_of_no_model_are_refused(raw, name):
    with pytest.raises(ValueError, match=rf"{name} must be .*not"):
        spec_from_config({"model_type": "glm", "head_dim": None, **raw})


def test_a_window_of_zero_is_none():
    raw = {"model_type": "mistral", "sliding_window": 0}
    assert spec_from_config(raw).window(0) is None
    with pytest.raises(ValueError, match="sliding_window must be 1 or more, not -1"):
        spec_from_config({**raw, "sliding_window": -1})


def test_null_says_no_where_only_yes_and_no_can_be():
    raw = {"model_type": "smollm3", "tie_word_embeddings": None, "attention_bias": None}
    assert not spec_from_config(raw).tie_embeddings


def test_a_byte_order_mark_before_a_config_is_skipped(tmp_path):
    (tmp_path / "config.json").write_text('\ufeff{"model_type": "llama"}', encoding="utf-8")
    assert facts_from_directory(tmp_path).spec.family == "llama"


@pytest.mark.parametrize("architectures", [None, [], "left out"])
def test_the_type_of_a_model_names_its_architecture(architectures):
    """After vllm PR #51665: `transformers` goes by `model_type`, too."""
    for kind, family in ARCHITECTURES.items():
        raw = {"head_dim": 128}
        if family.name == "granitemoehybrid":  # other layers than these are refused
            raw |= {"layer_types": ["attention"] * 32, "num_local_experts": 0}
        named = {} if architectures == "left out" else {"architectures": architectures}
        spec = spec_from_config({**raw, "model_type": family.name, **named})
        assert spec == spec_from_config({**raw, "architectures": [kind]})
    with pytest.raises(UnsupportedModel, match="model_type mamba"):
        spec_from_config({"model_type": "mamba"})


def test_numbers_of_a_config_may_be_in_odd_types():
    raw = {"architectures": ["LlamaForCausalLM"], "rope_theta": "500000", "hidden_size": 64.0}
    clear = {**raw, "rope_theta": 500_000.0, "hidden_size": 64}
    assert spec_from_config(raw) == spec_from_config(clear)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        facts_from_directory(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"null", b"{", b'{"a": "\xff"}', b""])
def test_broken_files_are_named(tmp_path, file, content):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{file} is not a JSON object: "):
        facts_from_directory(tmp_path)


def test_how_the_authors_sample_is_read(tmp_path):
    file = tmp_path / "generation_config.json"
    assert sampling_from_directory(tmp_path) == {}
    more = {"do_sample": True, "eos_token_id": [1, 2], "max_length": 4096, "top_p": None}
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, **more}))
    assert sampling_from_directory(tmp_path) == {"temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps({"top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}))
    given = {"top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}
    assert sampling_from_directory(tmp_path) == given


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [("top_k", 50.0, 50), ("top_k", "50", 50), ("temperature", "0.6", 0.6), ("top_p", 1, 1.0)],
)
def test_clear_values_in_odd_types_are_read(tmp_path, field, value, read):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    assert sampling_from_directory(tmp_path) == {field: read}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", -1), ("temperature", "hot"), ("top_k", 1.5), ("top_p", -1)),
        *(("min_p", [1]), ("repetition_penalty", 0.0), ("top_p", math.nan)),
    ],
)
def test_what_the_authors_cannot_mean_is_left_out_with_a_warning(tmp_path, caplog, field, value):
    """After vllm PR #51665: a request may bring its own value, so that the model is served."""
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"presence_penalty": 9, "min_p": 0.1, field: value}))
    assert sampling_from_directory(tmp_path) == ({} if field == "min_p" else {"min_p": 0.1})
    said = [each.getMessage() for each in caplog.records if each.name == "twolane.model"]
    assert [field in line for line in said] == [True]


@pytest.mark.parametrize(("ids", "read"), [("2", 2), (2.0, 2), ([2.0, "3"], [2, 3])])
def test_end_tokens_may_be_in_odd_types(tmp_path, ids, read):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    found = facts_from_directory(tmp_path).spec.eos_token_ids
    assert found == (tuple(read) if isinstance(read, list) else (read,))


@pytest.mark.parametrize("ids", ["two", 2.5, [None], {}])
def test_end_tokens_are_numbers(tmp_path, ids):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=r"generation_config\.json: .*eos_token_id"):
        facts_from_directory(tmp_path)
