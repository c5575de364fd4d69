"""Reads any tokenizer through `transformers` and writes it as one file. A program of its own.

`transformers` takes seconds to import and brings PyTorch with it, so no process that serves should.
`load_tokenizer` runs `python -m twolane.frontend.text.convert SOURCE TARGET` once a model.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tokenizers import decoders, pre_tokenizers

from twolane.frontend.text.tokenizer import TokenizerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DIGIT = re.compile("[0-9]")


def read(source: Path) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a model directory or GGUF file.

    Raises:
        ValueError: it is none that `transformers` can read, or has no fast form.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if source.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("its tokenizer has no fast form")
    if source.is_file():
        _mend_byte_level(tokenizer)
    return tokenizer


def convert(source: Path) -> TokenizerFile:
    """What serving needs of a tokenizer.

    Raises:
        ValueError: see `read`.
    """
    tokenizer = read(source)
    # Left over from training in many files; a prompt is neither cut nor filled up.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return TokenizerFile(tokenizer.backend_tokenizer.to_str(), template, specials)


def _mend_byte_level(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Give byte-level BPE of a GGUF file the steps around it that it was learned with.

    Such a file names its pre-tokenizer ("smollm", "starcoder", ...), but `transformers` takes the
    one of GPT-2 for names it does not know. The vocabulary tells: where digits were split, no
    learned token joins one with anything else. Without the split, spaces before a number would be
    cut differently than in training. Some versions (5.17) also read it as SentencePiece in part:
    a decoder that hides that every token is a string of bytes, and an unknown token.
    """
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    backend.model.unk_token = None
    backend.model.byte_fallback = backend.model.fuse_unk = False
    backend.normalizer = None
    backend.decoder = decoders.ByteLevel()
    learned = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if any(len(token) > 1 and _DIGIT.search(token) for token in learned):
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def main() -> int:
    """Convert; the exit code. What went wrong is the last line on standard error."""
    source, target = map(Path, sys.argv[1:])
    try:
        target.write_bytes(msgspec.json.encode(convert(source)))
    except Exception as error:  # whatever `transformers` makes of a broken tokenizer
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
