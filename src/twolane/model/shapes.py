"""Shapes of well-known models, for dummy weights: no files, no network, no tokenizer.

The values are those of each model's published `config.json` and `generation_config.json`.
"""

from dataclasses import replace

from twolane.model.spec import ModelSpec, MoeSpec, RopeSpec

_LLAMA_31_ROPE = RopeSpec(
    theta=500_000.0,
    type="llama3",
    factor=8.0,
    original_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def _llama_31(layers: int, hidden: int, heads: int, intermediate: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope=_LLAMA_31_ROPE,
        eos_token_ids=(128_001, 128_008, 128_009),
    )


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int) -> ModelSpec:
    return ModelSpec(
        family="qwen3",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151_936,
        max_positions=40_960,
        norm_eps=1e-6,
        rope=RopeSpec(theta=1_000_000.0),
        qk_norm="head",
        eos_token_ids=(151_645, 151_643),
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, dense: int, expert: int) -> ModelSpec:
    return replace(
        _qwen3(layers, hidden, heads, dense),
        family="qwen3_moe",
        kv_heads=4,
        moe=MoeSpec(experts=128, per_token=8, intermediate_size=expert),
    )


SHAPES: dict[str, ModelSpec] = {
    "smollm2-135m-instruct": ModelSpec(
        family="llama",
        layers=30,
        hidden_size=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49_152,
        max_positions=8192,
        norm_eps=1e-5,
        rope=RopeSpec(theta=100_000.0),
        tie_embeddings=True,
        eos_token_ids=(2,),
    ),
    "llama-3.1-8b": _llama_31(32, 4096, 32, 14_336),
    "llama-3.1-70b": _llama_31(80, 8192, 64, 28_672),
    "codellama-34b": ModelSpec(
        family="llama",
        layers=48,
        hidden_size=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate_size=22_016,
        vocab_size=32_000,
        max_positions=16_384,
        norm_eps=1e-5,
        rope=RopeSpec(theta=1_000_000.0),
        eos_token_ids=(2,),
    ),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12_288, 1536),
}
"""Built-in shapes by name."""
