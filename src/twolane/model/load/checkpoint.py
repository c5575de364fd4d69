"""The tensors that a checkpoint must have by its config: their names, shapes and types."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twolane.model.families.family import PARTS, ExpertNames
from twolane.model.load.facts import ModelFacts
from twolane.model.load.quantization import Format, StoredTensor
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
INPUTS_EMBEDDING = "model.embed_tokens_per_layer.weight"
INPUTS_PROJECTION = "model.per_layer_model_projection"
INPUTS_NORM = "model.per_layer_projection_norm.weight"
INPUT_GATE, INPUT_PROJECTION = "per_layer_input_gate", "per_layer_projection"
INPUT_NORM, LAYER_SCALE = "post_per_layer_input_norm.weight", "layer_scalar"
"""Names of what makes the layers' own inputs, of what each of them makes of its own, and of the
factors of layers (Gemma 4)."""
TOKEN_INPUTS = (INPUTS_EMBEDDING, INPUTS_PROJECTION, INPUTS_NORM)
LAYER_INPUTS = (INPUT_GATE, INPUT_PROJECTION, INPUT_NORM, LAYER_SCALE)


class WeightsError(ValueError):
    """The checkpoint's tensors are not those of its config; the message names them."""


@dataclass(frozen=True)
class LinearModule:
    """The shape of a linear module of a layer: [rows, columns] maps columns inputs to rows."""

    rows: int
    columns: int
    bias: bool
    """Whether it has a bias, [rows]."""


class Place(NamedTuple):
    """The place of a module that another one holds."""

    module: str
    """The name of the module that holds it."""
    first: int
    """The first of its rows there."""
    rows: int
    """The number of rows that the other one has."""


def part_rows(joined: str, spec: ModelSpec) -> dict[str, int]:
    """Return the modules that a module joins, and their numbers of rows."""
    rows = {"self_attn.q_proj": spec.q_rows, "self_attn.k_proj": spec.kv_size}
    rows["self_attn.v_proj"] = spec.kv_size
    return {part: rows.get(part, spec.intermediate_size) for part in PARTS[joined]}


def place_of(name: str, facts: ModelFacts) -> Place | None:
    """Return a module's place in another one, for families that join modules; else None."""
    for joined in facts.family.joined:
        first, parts = 0, part_rows(joined, facts.spec)
        for part, rows in parts.items():
            if name.endswith(part):
                return Place(name.removesuffix(part) + joined, first, sum(parts.values()))
            first += rows
    return None


def linears_of(facts: ModelFacts, layer: int) -> dict[str, LinearModule]:
    """Return the linear modules of a layer, those of its experts and their router among them."""
    spec, hidden = facts.spec.at(layer), facts.spec.hidden_size
    linears = _attention(facts, layer)
    if inputs := spec.layer_inputs:
        linears[INPUT_GATE] = LinearModule(inputs, hidden, bias=False)
        linears[INPUT_PROJECTION] = LinearModule(hidden, inputs, bias=False)
    if facts.spec.has_dense(layer):
        linears |= _mlp("mlp", _USUAL, spec.intermediate_size, hidden, spec.mlp_bias)
    if spec.moe is None or not spec.has_experts(layer):
        return linears
    names, width = facts.family.experts, spec.moe.intermediate_size
    for expert in map(names.expert.format, range(spec.moe.experts)):
        linears |= _mlp(expert, names, width, hidden, spec.moe.biases)
    linears[names.router] = LinearModule(spec.moe.experts, hidden, spec.moe.biases)
    if spec.moe.shared:
        linears |= _mlp(names.shared, _USUAL, width * spec.moe.shared, hidden, bias=False)
    if spec.moe.gated:
        linears[names.shared_gate] = LinearModule(1, hidden, bias=False)
    return linears


_USUAL = ExpertNames()
"""Names of the modules of an MLP, which some families call otherwise in experts."""


def _mlp(
    stem: str, names: ExpertNames, width: int, hidden: int, bias: bool
) -> dict[str, LinearModule]:
    """Return the linear modules of one MLP."""
    wide = LinearModule(width, hidden, bias)
    down = LinearModule(hidden, width, bias)
    return {f"{stem}.{names.gate}": wide, f"{stem}.{names.up}": wide, f"{stem}.{names.down}": down}


def _attention(facts: ModelFacts, layer: int) -> dict[str, LinearModule]:
    """Return the linear modules of a layer's attention."""
    spec, kind, hidden = facts.spec.at(layer), facts.spec.kind(layer), facts.spec.hidden_size
    delta = spec.delta
    if spec.convolution is not None and facts.spec.is_linear(layer):
        return {
            "short_conv.in_proj": LinearModule(3 * hidden, hidden, bias=False),
            "short_conv.out_proj": LinearModule(hidden, hidden, bias=False),
        }
    if delta is None or not facts.spec.is_linear(layer):
        rows = spec.gate_rows
        own = () if kind.reads_earlier else ("k",) if kind.keys_are_values else ("k", "v")
        return {
            "self_attn.q_proj": LinearModule(spec.q_rows, hidden, spec.qkv_bias),
            **{
                f"self_attn.{n}_proj": LinearModule(spec.kv_size, hidden, spec.qkv_bias)
                for n in own
            },
            "self_attn.o_proj": LinearModule(hidden, spec.q_size, spec.o_bias),
            **({"self_attn.g_proj": LinearModule(rows, hidden, False)} if rows else {}),
        }
    apart = {
        "qkv": delta.mixed_size,
        "z": delta.value_size,
        "b": delta.value_heads,
        "a": delta.value_heads,
    }
    grouped = {"qkvz": delta.projected, "ba": 2 * delta.value_heads}
    projections = grouped if facts.family.grouped_delta else apart
    return {
        **{
            f"linear_attn.in_proj_{name}": LinearModule(rows, hidden, bias=False)
            for name, rows in projections.items()
        },
        "linear_attn.out_proj": LinearModule(hidden, delta.value_size, bias=False),
    }


def vectors_of(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a layer's attention that are no linear modules."""
    if spec.delta is not None and spec.is_linear(layer):
        heads, attention = (spec.delta.value_heads,), "linear_attn"
        return {
            f"{attention}.conv1d.weight": (spec.delta.mixed_size, 1, spec.delta.taps),
            f"{attention}.A_log": heads,
            f"{attention}.dt_bias": heads,
            f"{attention}.norm.weight": (spec.delta.value_dim,),
        }
    if spec.convolution is not None and spec.is_linear(layer):
        return {"short_conv.conv.weight": (spec.hidden_size, 1, spec.convolution.taps)}
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.heads,)
    if spec.qk_norm is None or spec.bare_qk_norm:
        return shapes
    at, whole = spec.at(layer), spec.qk_norm == "whole"
    sizes = {"q_norm": at.q_size, "k_norm": at.kv_size}
    if spec.kind(layer).reads_earlier:
        del sizes["k_norm"]
    return shapes | {
        f"self_attn.{name}.weight": (size if whole else at.head_dim,)
        for name, size in sizes.items()
    }


def expected_tensors(facts: ModelFacts) -> dict[str, StoredTensor]:
    """Return every tensor of a model, as Hugging Face checkpoints store them.

    Raises:
        ValueError: a module cannot be stored as the quantisation says.
    """
    spec, stored = facts.spec, dict[str, StoredTensor]()
    norm = StoredTensor(((spec.hidden_size,),))

    def linear(name: str, module: LinearModule) -> None:
        form, place = stored_form(name, facts)
        if place is None:
            stored.update(module_tensors(name, module, form))
            return
        whole = LinearModule(place.rows, module.columns, bias=False)
        stored.update(module_tensors(place.module, whole, form))
        if module.bias:
            stored[f"{name}.bias"] = StoredTensor(((module.rows,),))

    stored[EMBEDDING] = StoredTensor(((spec.vocab_size, spec.hidden_size),))
    stored["model.norm.weight"] = norm
    if not spec.tie_embeddings:
        linear("lm_head", LinearModule(spec.vocab_size, spec.hidden_size, bias=False))
    for i in range(spec.layers):
        prefix = f"model.layers.{i}"
        stored.update({f"{prefix}.{name}.weight": norm for name in facts.family.norms.values()})
        for name, shape in vectors_of(spec, i).items():
            stored[f"{prefix}.{name}"] = StoredTensor((shape,))
        for name, module in linears_of(facts, i).items():
            linear(f"{prefix}.{name}", module)
        if spec.moe is not None and spec.moe.biased and spec.has_experts(i):
            count = spec.moe.experts
            bias = StoredTensor(((count,), (1, count)))
            stored[f"{prefix}.{facts.family.experts.bias}"] = bias
        stored.update(_added_tensors(facts, i))
    if width := spec.layer_inputs:
        joined = LinearModule(spec.layers * width, spec.hidden_size, bias=False)
        stored[INPUTS_EMBEDDING] = StoredTensor(((spec.vocab_size, joined.rows),))
        linear(INPUTS_PROJECTION, joined)
        stored[INPUTS_NORM] = StoredTensor(((width,),))
    return stored


def _added_tensors(facts: ModelFacts, layer: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what layers have beside matrices, biases and the norms of their family."""
    spec, names, prefix = facts.spec, facts.family.experts, f"model.layers.{layer}"
    norm = StoredTensor(((spec.hidden_size,),))
    if spec.layer_scales:
        yield f"{prefix}.{LAYER_SCALE}", StoredTensor(((1,), ()))
    if spec.layer_inputs:
        yield f"{prefix}.{INPUT_NORM}", norm
    if spec.moe is not None and spec.moe.beside_dense and spec.has_experts(layer):
        for name in names.side.values():
            yield f"{prefix}.{name}", norm
        yield f"{prefix}.{names.scales}", StoredTensor(((spec.moe.experts,),))


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


def stored_form(name: str, facts: ModelFacts) -> tuple[Format | None, Place | None]:
    """Return the format of a linear module, and its place if it is a part of a quantised one."""
    if facts.quantization is None:
        return None, None
    place = place_of(name, facts)
    form = facts.quantization.format(name if place is None else place.module)
    return form, None if form is None else place


def check_tensors(facts: ModelFacts, tensors: TensorSource) -> None:
    """Refuse a checkpoint whose tensors are not those of its config.

    As in `transformers`, surplus tensors of a model that is not quantised are ignored.

    Args:
        facts: What its configs say.
        tensors: The tensors of its files.

    Raises:
        WeightsError: tensors are missing, or of another shape or type, or surplus in a quantised
            model, where they may change what the others mean.
    """
    name, quantization = facts.name, facts.quantization
    expected = expected_tensors(facts)
    unused = quantization.unused if quantization is not None else ()
    names = {t for t in tensors.names() if not t.endswith((*_IGNORED, *unused))}
    if facts.family.predicts_more:
        names = {t for t in names if not _predicts_more(t, facts.spec.layers)}
    if left := sum(t.endswith(unused) for t in tensors.names()):
        log.info("%s: %d calibrated scales are ignored: each token has its own", name, left)
    if facts.spec.tie_embeddings and HEAD in names:
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
    if quantization is not None:
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
    if surplus:
        log.warning(
            "%s: tensors that its config does not have are ignored: %s", name, listed(surplus)
        )


def _predicts_more(tensor: str, layers: int) -> bool:
    """Return whether a tensor belongs to what predicts further tokens, not to the model itself."""
    place = tensor.removeprefix("model.").split(".")
    if place[0] == "layers" and len(place) > 1 and place[1].isdigit():
        return int(place[1]) >= layers
    return place[0].startswith("mtp")


def refuse_tensors(name: str, what: str, which: Sequence[str]) -> None:
    """Refuse a checkpoint for some of its tensors, if there are any.

    Args:
        name: The name of the model.
        what: The adjective that says what is wrong with them.
        which: Their names, and what else to say of each.

    Raises:
        WeightsError: there are; the message has the first of them.
    """
    if which:
        raise WeightsError(f"{name}: {what} tensors: {listed(which)}")


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
