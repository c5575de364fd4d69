"""The tensors that a checkpoint must have by its config: their names, shapes and types."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twolane.model.load.configs import JOINED
from twolane.model.load.joined import Place, place_of
from twolane.model.load.quantization import Format, Quantization, StoredTensor
from twolane.model.load.source import TensorSource
from twolane.model.spec import ModelSpec

log = logging.getLogger("twolane.model")

_MAX_NAMED = 5
"""Number of tensors that an error names; it counts the others."""
_IGNORED = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
"""Ends of the names of tensors in old checkpoints that follow from the config."""
_ZEROS = (".bias", "_zero_point")
"""Ends of the names of tensors that mean nothing where they are zeros."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightsError(ValueError):
    """The checkpoint's tensors are not those of its config; the message names them."""


@dataclass(frozen=True)
class LinearModule:
    """The shape of a linear module of a layer: [rows, columns] maps columns inputs to rows."""

    rows: int
    columns: int
    bias: bool
    """Whether it has a bias, [rows]."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the parts of a mixture of experts in a family's checkpoints."""

    router: str
    expert: str
    """Name of one expert, in which its number is filled in."""
    gate: str
    up: str
    down: str


_MIXTRAL = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")
_QWEN3_MOE = ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")


def expert_names(spec: ModelSpec) -> ExpertNames:
    """Return the names of experts in checkpoints of the spec's family."""
    return _MIXTRAL if spec.family == "mixtral" else _QWEN3_MOE


def linears_of(spec: ModelSpec, layer: int) -> dict[str, LinearModule]:
    """Return the linear modules of a layer, those of its experts and their router among them."""
    return _attention_linears(spec) | _mlp_linears(spec, layer) | _router(spec, layer)


def _router(spec: ModelSpec, layer: int) -> dict[str, LinearModule]:
    """Return the router of a layer, by its name, if it has experts; few checkpoints quantise it."""
    if not spec.has_experts(layer) or spec.moe is None:
        return {}
    return {expert_names(spec).router: LinearModule(spec.moe.experts, spec.hidden_size, bias=False)}


def is_router(module: str, spec: ModelSpec) -> bool:
    """Return whether a module is a router."""
    return spec.moe is not None and module.endswith(f".{expert_names(spec).router}")


def _mlp_linears(spec: ModelSpec, layer: int) -> dict[str, LinearModule]:
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    if not spec.has_experts(layer):
        return {
            "mlp.gate_proj": LinearModule(mlp, hidden, spec.mlp_bias),
            "mlp.up_proj": LinearModule(mlp, hidden, spec.mlp_bias),
            "mlp.down_proj": LinearModule(hidden, mlp, spec.mlp_bias),
        }
    assert spec.moe is not None
    names, width = expert_names(spec), spec.moe.intermediate_size
    linears = {}
    for prefix in map(names.expert.format, range(spec.moe.experts)):
        linears[f"{prefix}.{names.gate}"] = LinearModule(width, hidden, bias=False)
        linears[f"{prefix}.{names.up}"] = LinearModule(width, hidden, bias=False)
        linears[f"{prefix}.{names.down}"] = LinearModule(hidden, width, bias=False)
    return linears


def _attention_linears(spec: ModelSpec) -> dict[str, LinearModule]:
    hidden = spec.hidden_size
    return {
        "self_attn.q_proj": LinearModule(spec.q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": LinearModule(spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": LinearModule(spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": LinearModule(hidden, spec.q_size, spec.o_bias),
    }


def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a model that is not quantised."""
    for name, stored in expected_tensors(spec, None).items():
        yield name, stored.shapes[0]


def expected_tensors(spec: ModelSpec, quantization: Quantization | None) -> dict[str, StoredTensor]:
    """Return every tensor of a model, as Hugging Face checkpoints store them.

    Raises:
        ValueError: a module cannot be stored as the quantisation says.
    """
    hidden, stored = spec.hidden_size, dict[str, StoredTensor]()

    def linear(name: str, module: LinearModule) -> None:
        form, place = stored_form(name, spec, quantization)
        if place is None:
            stored.update(module_tensors(name, module, form))
            return
        whole = LinearModule(place.rows, module.columns, bias=False)
        stored.update(module_tensors(place.module, whole, form))
        if module.bias:
            stored[f"{name}.bias"] = StoredTensor(((module.rows,),))

    stored[EMBEDDING] = StoredTensor(((spec.vocab_size, hidden),))
    stored["model.norm.weight"] = StoredTensor(((hidden,),))
    if not spec.tie_embeddings:
        linear("lm_head", LinearModule(spec.vocab_size, hidden, bias=False))
    for i in range(spec.layers):
        prefix = f"model.layers.{i}"
        for norm in norm_names(spec).values():
            stored[f"{prefix}.{norm}.weight"] = StoredTensor(((hidden,),))
        if spec.qk_norm:
            for name, size in (("q_norm", spec.q_size), ("k_norm", spec.kv_size)):
                shape = size if spec.qk_norm_whole else spec.head_dim
                stored[f"{prefix}.self_attn.{name}.weight"] = StoredTensor(((shape,),))
        for name, module in linears_of(spec, i).items():
            linear(f"{prefix}.{name}", module)
    return stored


def norm_names(spec: ModelSpec) -> dict[str, str]:
    """Return the names of a layer's norms in checkpoints, by the fields of `LayerWeights`."""
    if not spec.post_norms:
        return {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if not spec.pre_norms:
        return {
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
    return {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }


def module_tensors(name: str, module: LinearModule, form: Format | None) -> dict[str, StoredTensor]:
    """Return the tensors of a linear module.

    Raises:
        WeightsError: a module of this shape cannot be stored so.
    """
    if form is None:
        tensors: Mapping[str, StoredTensor] = {
            "weight": StoredTensor(((module.rows, module.columns),))
        }
    else:
        try:
            tensors = form.tensors(module.rows, module.columns)
        except ValueError as error:
            raise WeightsError(f"{name} cannot be stored as {form.name}: {error}") from error
    bias = {"bias": StoredTensor(((module.rows,),))} if module.bias else {}
    return {f"{name}.{end}": stored for end, stored in (*tensors.items(), *bias.items())}


def stored_form(
    name: str, spec: ModelSpec, quantization: Quantization | None
) -> tuple[Format | None, Place | None]:
    """Return the format of a linear module, and its place if it is a part of a quantised one."""
    if quantization is None:
        return None, None
    place = place_of(name, spec) if spec.family in JOINED else None
    form = quantization.format(name if place is None else place.module)
    return form, None if form is None else place


def check_tensors(
    spec: ModelSpec, tensors: TensorSource, quantization: Quantization | None, name: str
) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of its config.

    Args:
        spec: of its config.
        tensors: those of its files.
        quantization: how its matrices are stored; None: as they are.
        name: of the model, for the error.

    Raises:
        WeightsError: tensors are missing, surplus, or of another shape or type.
    """
    expected = expected_tensors(spec, quantization)
    unused = quantization.unused if quantization is not None else ()
    names = {t for t in tensors.names() if not t.endswith((*_IGNORED, *unused))}
    if left := sum(t.endswith(unused) for t in tensors.names()):
        log.info("%s: %d calibrated scales are ignored: each token has its own", name, left)
    if spec.tie_embeddings and HEAD in names:
        names.remove(HEAD)  # it equals the embeddings
    there = {t: stored for t, stored in expected.items() if t in names}
    surplus = sorted(names - expected.keys())
    if quantization is not None:  # writers add zeros: biases, and points of symmetric formats
        surplus = [t for t in surplus if not (t.endswith(_ZEROS) and not tensors.get(t).any())]
    if quantised := [t for t in surplus if t.startswith(EMBEDDING.removesuffix("weight"))]:
        raise WeightsError(
            f"{name}: quantised embeddings are not read, such as {quantised[0]}; those of 16 or 32 "
            "bits are"
        )
    missing = [t for t, stored in expected.items() if t not in names and not stored.optional]
    refuse_tensors(name, "missing", missing)
    refuse_tensors(name, "surplus", surplus)
    misshapen = [
        f"{t} {list(tensors.shape(t))} instead of {list(stored.shapes[0])}"
        for t, stored in there.items()
        if tensors.shape(t) not in stored.shapes
    ]
    refuse_tensors(name, "misshapen", misshapen)
    mistyped = [
        f"{t} {tensors.type(t)} instead of {' or '.join(stored.types)}"
        for t, stored in there.items()
        if tensors.type(t) not in stored.types
    ]
    refuse_tensors(name, "mistyped", mistyped)


def refuse_tensors(name: str, what: str, which: Sequence[str]) -> None:
    """Refuse a checkpoint for some of its tensors, if there are any.

    Args:
        name: of the model.
        what: is wrong with them, an adjective.
        which: names and what else to say of each.

    Raises:
        WeightsError: there are; the message has the first of them.
    """
    if not which:
        return
    more = len(which) - _MAX_NAMED
    listed = ", ".join(which[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    raise WeightsError(f"{name}: {what} tensors: {listed}")
