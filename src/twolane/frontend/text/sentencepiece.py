"""SentencePiece vocabularies as `tokenizers`: those of `tokenizer.model` and of GGUF files."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The types of pieces, as SentencePiece and GGUF number them."""
SPACE = "\u2581"


def build(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, prefix: bool
) -> Tokenizer:
    """Return byte-pair encoding by scores: of two neighbours, those with the best union merge.

    Args:
        pieces: by id.
        scores: of the pieces; the higher, the earlier they are merged.
        kinds: of the pieces.
        prefix: whether a space is put before each text.
    """
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    found = []
    for place, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[place], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    unknown = next((p for p, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocabulary,
        [(left, right) for *_, left, right in found],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    made = Tokenizer(model)
    before = [normalizers.Prepend(SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_pieces(made, pieces, kinds)
    return made


def add_pieces(made: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Let pieces that are found as they are in a text be added tokens."""
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            made.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            made.add_tokens([AddedToken(piece, special=False, normalized=False)])


def read_model(path: Path) -> Tokenizer:
    """Read a `tokenizer.model`.

    Raises:
        ValueError: the packages for it are missing, it is no SentencePiece model, or one that
            normalises texts.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2 as form
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
    if kind != "BPE" or model.normalizer_spec.precompiled_charsmap:
        raise ValueError(
            f"{path.name} is a {kind} model with normalisation "
            f"{model.normalizer_spec.name or 'none'}; BPE without normalisation works, "
            "and any kind as tokenizer.json"
        )
    pieces = model.pieces
    return build(
        [p.piece for p in pieces],
        [p.score for p in pieces],
        [p.type for p in pieces],
        prefix=model.normalizer_spec.add_dummy_prefix,
    )
