"""Compares a tokenizer with that of `transformers` for the same files."""

from pathlib import Path

from tokenizers import Tokenizer

PROBES = (
    *("one", " one", "  two spaces", "trailing  ", "\n\n\tx = 1\r\n", "3.14 12345", "don't WE'LL"),
    *(
        "naïve e\u0301 ﬁ Å",
        "你好,世界 日本",
        "مرحبا שלום",
        "😀🏳️‍🌈 👍🏽",
        "\x00\x07\u200b",
        "a" * 99,
    ),
)
"""Texts whose tokens are compared."""


def disagreement(source: Path, backend: Tokenizer) -> str | None:
    """Return the first text that `transformers` tokenises differently; None: there is none.

    Raises:
        ValueError: `transformers` cannot read the tokenizer, so that it has no opinion.
    """
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(source)
        opinions = [theirs(probe).input_ids for probe in PROBES]
    except Exception as error:  # whatever a broken tokenizer leads to there
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for probe, others in zip(PROBES, opinions, strict=True):
        ids = backend.encode(probe).ids
        if ids != others:
            return (
                f"{probe!r} is {ids} by tokenizer.json, which holds, and {others} "
                f"by {type(theirs).__name__} of transformers"
            )
    return None
