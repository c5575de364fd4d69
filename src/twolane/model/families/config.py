"""The fields of a `config.json` that are read, with the defaults of most model families."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, get_args

import msgspec

from twolane.model.spec import (
    MAX_HEADS,
    MAX_LAYERS,
    UNROTATED,
    LayerKind,
    RopeSpec,
    RopeType,
    UnsupportedModel,
)

_LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES: Mapping[str, RopeType] = {
    name: name for name in get_args(RopeType) if name not in ("factors", "none")
}


class DualChunkConfig(msgspec.Struct):
    """Attention of Qwen2.5-1M, which is not built: positions are compared within chunks."""

    chunk_size: int = 8192
    local_size: int = 1024


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields that are read of a `config.json`.

    Fields that are not there have the defaults of the family's class in `transformers`. That is not
    asked: its import takes longer than all else that starts an engine, PyTorch's included. Where a
    family computes something else from its fields, its class overrides a method.
    """

    rope_types: ClassVar[Mapping[str, RopeType]] = ROPE_TYPES
    """The types of `rope_parameters` that the family knows, and what they are."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    is_causal: bool | None = True
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The older name of `rope_parameters`, without theta."""
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    dual_chunk_attention_config: DualChunkConfig | None = None

    def check(self) -> None:
        """Compare numbers of parts before anything is made for each of them, and refuse options
        that are not built.

        Raises:
            UnsupportedModel: an option is not built.
            ValueError: a number is not that of a model.
        """
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers must be 1 to {MAX_LAYERS}, not {layers}")
        if not 1 <= heads <= MAX_HEADS:
            raise ValueError(f"num_attention_heads must be 1 to {MAX_HEADS}, not {heads}")
        if self.max_position_embeddings < 1:
            problem = f"must be 1 or more, not {self.max_position_embeddings}"
            raise ValueError(f"config.json: max_position_embeddings {problem}")
        if other := {*(self.layer_types or ())} - {*_LAYER_TYPES}:
            raise UnsupportedModel.because("layer_types", min(other), _LAYER_TYPES)
        if self.is_causal is False:  # each token would be attended to by those before it, too
            raise UnsupportedModel.because("is_causal", self.is_causal, ("True",))

    def head_size(self) -> int:
        """Return the numbers of one attention head.

        Raises:
            ValueError: the config does not say it, and the hidden state has no equal parts.
        """
        if self.head_dim:
            return self.head_dim
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"config.json: hidden_size {self.hidden_size} is no multiple of "
                f"num_attention_heads {self.num_attention_heads}, and there is no head_dim"
            )
        return self.hidden_size // self.num_attention_heads

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of `ModelSpec` that the family has, or reads in its own way.

        Raises:
            ValueError: the config lacks one, or one that is divided by is 0.
        """
        return {}

    def unrotated_layers(self) -> Iterable[int]:
        """Return the layers whose queries and keys are not rotated.

        Raises:
            ValueError: the config does not say it for each layer.
        """
        return ()

    def sliding_layers(self) -> Iterable[int]:
        """Return the layers that have a sliding window, if the config has one at all."""
        return ()

    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer; none where all are alike and see all tokens.

        A window of 0 is none, as in vLLM and llama.cpp.

        Raises:
            ValueError: the window is negative, or a list has not one value for each layer.
        """
        sliding = {*self.sliding_layers()} if self.sliding_window else set()
        unrotated = {*self.unrotated_layers()}
        if not sliding and not unrotated:
            return ()
        if sliding and (window := self.sliding_window or 0) < 0:
            raise ValueError(f"config.json: sliding_window must be 1 or more, not {window}")
        return tuple(
            LayerKind(
                window=self.sliding_window if i in sliding else None,
                rope=UNROTATED if i in unrotated else None,
            )
            for i in range(self.num_hidden_layers)
        )

    def typed_layers(self, otherwise: Iterable[int]) -> Iterable[int]:
        """Return the layers whose type is `sliding_attention`, or `otherwise` without types.

        Raises:
            ValueError: `layer_types` has not one value for each layer.
        """
        types = self.layer_types
        if types is None:
            return otherwise
        if len(types) != self.num_hidden_layers:
            problem = f"has {len(types)} values for {self.num_hidden_layers} layers"
            raise ValueError(f"config.json: layer_types {problem}")
        return [i for i, each in enumerate(types) if each == "sliding_attention"]

    def stated_rope(self) -> dict[str, Any]:
        """Return what the config says of the rotary embedding, in the form of `rope_parameters`.

        The older name comes first, as in `transformers`. A scaling that was added to a newer config
        says nothing of the base and of what is rotated: these stay. The original positions of the
        config itself come before those of the scaling.
        """
        newer, older = self.rope_parameters or {}, self.rope_scaling
        kept = ("rope_theta", "partial_rotary_factor") if older else tuple(newer)
        stated = {name: newer[name] for name in kept if name in newer} | (older or {})
        original = "original_max_position_embeddings"
        stated[original] = self.original_max_position_embeddings or stated.get(original)
        stated["rope_theta"] = stated.get("rope_theta") or self.rope_theta
        stated.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        return stated

    def positions(self, rope: RopeSpec) -> int:
        """Return the most tokens of a sequence, given the model's rotary embedding."""
        positions, chunks = self.max_position_embeddings, self.dual_chunk_attention_config
        if rope.type == "yarn":  # those of the config may be the ones before stretching
            positions = round(rope.original_positions * rope.factor)
        if chunks is not None:  # shorter ones are within one chunk
            positions = min(positions, chunks.chunk_size - chunks.local_size)
        return positions
