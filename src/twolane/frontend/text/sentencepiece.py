"""SentencePiece vocabularies of `tokenizer.model` and GGUF files, for the library `tokenizers`."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces in SentencePiece and GGUF."""
SPACE = "\u2581"


class Spaces(NamedTuple):
    """Normalisation of the spaces of a text."""

    prefix: Literal["each", "first", "none"] = "each"
    """Where a space is added: before the text, and with "each" also after each special token."""
    trimmed: bool = False
    """Whether spaces around the text are removed and runs of them merged."""


def build(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], spaces: Spaces
) -> Tokenizer:
    """Return byte-pair encoding by scores: the neighbours with the best-scored union merge first.

    Args:
        pieces: the texts of the pieces, by id.
        scores: scores of the pieces; those with higher ones are merged earlier.
        kinds: types of the pieces.
        spaces: normalisation of spaces.
    """
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = []
    for place, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[place], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    unknown = next((p for p, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocabulary,
        [(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    return finished(Tokenizer(model), pieces, kinds, spaces)


def finished(
    backend: Tokenizer, pieces: Sequence[str], kinds: Sequence[int], spaces: Spaces
) -> Tokenizer:
    """Set a tokenizer's normaliser, decoder and added tokens."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if spaces.trimmed:
        first = [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")]
        steps = [*first, *steps, normalizers.Replace(Regex(f"{SPACE}+\\z"), "")]
    if spaces.prefix == "each":
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    if spaces.prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    strip = [] if spaces.prefix == "none" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_pieces(backend, pieces, kinds)
    return backend


def add_pieces(backend: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Add pieces that are matched literally as added tokens."""
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            backend.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(piece, special=False, normalized=False)])


def read_model(
    path: Path, names: Mapping[int, str | None] | None = None, *, legacy: bool = True
) -> Tokenizer:
    """Read a `tokenizer.model`.

    Args:
        path: the file.
        names: other names of some pieces, by id; each is found as it is in a text.
        legacy: true if a space is put after each special token, too; `transformers` has a setting
            of this name.

    Raises:
        ValueError: the packages for it are missing, it is no SentencePiece model, or one that
            normalises characters (the `tokenizers` library loses some combining marks there), or
            none of byte-pair encoding.
    """
    try:
        form = import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ValueError(
            "tokenizer.model alone needs the sentencepiece package: "
            "pip install 'twolane[sentencepiece]'"
        ) from error
    model = form.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:
        raise ValueError(f"{path.name} is no model of SentencePiece: {error}") from error
    kind = form.TrainerSpec.ModelType.Name(model.trainer_spec.model_type)
    pieces, normalizer = model.pieces, model.normalizer_spec
    if kind != "BPE" or normalizer.precompiled_charsmap:
        raise ValueError(
            f"{path.name} is a {kind} model of SentencePiece with normalisation "
            f"{normalizer.name or 'none'}; "
            "BPE without normalisation works, and any kind as tokenizer.json"
        )
    for place, name in (names or {}).items():
        if name is not None and place < len(pieces) and pieces[place].piece != name:
            pieces[place].piece, pieces[place].type = name, USER_DEFINED
    prefix: Literal["each", "first", "none"] = "each" if legacy else "first"
    return build(
        [p.piece for p in pieces],
        [p.score for p in pieces],
        [p.type for p in pieces],
        Spaces(
            prefix if normalizer.add_dummy_prefix else "none", normalizer.remove_extra_whitespaces
        ),
    )
