"""Opens a model's tensors under Hugging Face names: safetensors, GGUF or random numbers."""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from twolane.model.load.checkpoint import EMBEDDING, HEAD, expected_tensors, refuse_tensors
from twolane.model.load.dummy import STD, Dummy
from twolane.model.load.facts import ModelFacts
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import ModelSource
from twolane.model.load.mtp import check_predictor
from twolane.model.load.parts import of_gguf_experts, of_joined, of_stacked
from twolane.model.load.quantization import FLOATS
from twolane.model.load.safetensors import Safetensors
from twolane.model.load.source import TensorSource
from twolane.model.load.stored_formats import with_stored_formats
from twolane.model.spec import skewed

log = logging.getLogger("twolane.model")


def open_tensors(
    source: ModelSource, facts: ModelFacts, stack: ExitStack
) -> tuple[ModelFacts, TensorSource]:
    """Open the tensors of a model's files.

    Args:
        source: The model.
        facts: What its configs say.
        stack: Closes the files.

    Returns:
        The facts, as the tensors have them where they differ from the configs, and the tensors.

    Raises:
        WeightsError: tensors are missing or of the wrong shape.
        ValueError: files are missing or broken.
    """
    if source.path is None:
        raise ValueError(f"{source.name} is a built-in shape without weights; load it as dummy")
    tensors: TensorSource
    if source.kind == "gguf":
        gguf = GGUFModel(source.path)
        facts = replace(facts, rounded=gguf.rounded())
        tensors = of_gguf_experts(gguf, facts)
    else:
        facts, tensors = _open_directory(source.path, facts, stack)
        if facts.spec.moe is not None:
            tensors = of_stacked(tensors, facts)
        if facts.quantization is not None:
            facts = with_stored_formats(facts, tensors)
        if facts.family.stores_mtp:
            check_predictor(facts, tensors)
    return facts, of_joined(tensors, facts) if facts.family.joined else tensors


def _open_directory(
    path: Path, facts: ModelFacts, stack: ExitStack
) -> tuple[ModelFacts, TensorSource]:
    """Open a directory; return the facts, with `tie_embeddings` as the tensors have it, and the
    tensors.

    Raises:
        WeightsError: the files lack a classifier that their index names.
    """
    less_1 = facts.family.norms_less_1
    tensors = Safetensors(path, stack, vision=facts.vision, norms_less_1=less_1)
    for name in tensors.names() if facts.family.renamed else ():
        if (usual := facts.family.usual_name(name)) != name:
            tensors.rename(name, usual)
    if not facts.spec.tie_embeddings:  # without an index, the embeddings might be meant
        lacking = {HEAD} & tensors.indexed - {*tensors.names()}
        refuse_tensors(facts.name, "missing", sorted(lacking))
    tied = _ties_embeddings(facts, tensors)
    facts = replace(facts, spec=replace(facts.spec, tie_embeddings=tied))
    if tied and HEAD in tensors.names() and EMBEDDING not in tensors.names():
        tensors.rename(HEAD, EMBEDDING)  # of two names of one tensor, either may be stored
    return facts, tensors


def _ties_embeddings(facts: ModelFacts, tensors: TensorSource) -> bool:
    """Return whether the embeddings serve as the classifier. The tensors hold against the config.

    A head that differs from the embeddings is used, as `transformers` uses it; where there is none
    the embeddings serve as one, for nothing else can be meant.
    """
    stored, tied = set(tensors.names()), facts.spec.tie_embeddings
    has_head = any(tensor.startswith("lm_head.") for tensor in stored)
    if not has_head and not tied:
        log.warning("%s: lm_head.weight is missing: the embeddings are used instead", facts.name)
        return True
    if not has_head or not tied or EMBEDDING not in stored:
        return tied
    if HEAD in stored and _same(tensors, HEAD, EMBEDDING):
        return True
    log.warning(
        "%s: lm_head.weight is used: it differs from the embeddings, despite tie_word_embeddings",
        facts.name,
    )
    return False


def _same(tensors: TensorSource, one: str, other: str) -> bool:
    """Return whether two tensors of floats are equal."""
    if tensors.shape(one) != tensors.shape(other) or tensors.type(one) not in FLOATS:
        return False
    return bool((tensors.get(one) == tensors.get(other)).all())


def dummy_tensors(
    facts: ModelFacts, seed: int, router_skew: float, device: torch.device
) -> tuple[ModelFacts, Dummy]:
    """Return random tensors of a model's shape, and the facts of a model that stores floats.

    Args:
        facts: What the model's configs say.
        seed: The seed of the random numbers.
        router_skew: The `MoeSpec.skew` of the routers.
        device: The device where they are drawn.
    """
    spec = skewed(facts.spec, router_skew)
    facts = replace(facts, spec=spec, quantization=None)
    shapes = {name: stored.shapes[0] for name, stored in expected_tensors(facts).items()}
    moe = spec.moe
    if moe is None:
        return facts, Dummy(shapes, seed, device)
    # With equal deviations, every token of a prompt soon has nearly the same hidden state, for
    # attention adds the mean over all tokens to each of them, and few experts are chosen by all.
    # So here what layers add is small beside the embeddings, as in models that are trained.
    names, added = facts.family.experts, STD / math.sqrt(2 * spec.layers)
    ends = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", f".{names.down}.weight")
    deviations = {name: added for name in shapes if name.endswith(ends)} | {EMBEDDING: 1.0}
    routers = [name for name in shapes if name.endswith(f".{names.router}.weight")]
    shares = moe.shares if moe.skew else ()
    return facts, Dummy(shapes, seed, device, routers, shares, deviations)
