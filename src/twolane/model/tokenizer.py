"""Tokenizers through `transformers`, with what GGUF files leave out put back."""

import re
from typing import TYPE_CHECKING

from tokenizers import pre_tokenizers

from twolane.model.hub import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DIGIT = re.compile("[0-9]")


def load_tokenizer(source: ModelSource) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a model, with its chat template.

    Raises:
        ValueError: the model has no tokenizer, or not one that `transformers` can read.
    """
    if source.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if source.tokenizer.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
    else:
        folder, file = source.tokenizer.parent, source.tokenizer.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{source.name}: its tokenizer has no fast form")
    if source.tokenizer.is_file():
        _split_digits(tokenizer)
    return tokenizer


def _split_digits(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Split digits one by one before byte-level BPE where the vocabulary was learned so.

    A GGUF file names its pre-tokenizer ("smollm", "starcoder", ...), but `transformers` takes the
    one of GPT-2 for names it does not know. The vocabulary tells: where digits were split, no
    learned token joins one with anything else. Without the split, spaces before a number would be
    cut differently than in training.
    """
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    learned = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if any(len(token) > 1 and _DIGIT.search(token) for token in learned):
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
