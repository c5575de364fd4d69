"""A tiny random checkpoint that serves text: a byte-level tokenizer and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from twolane.frontend.text.codec import byte_alphabet

from ..model.checkpoints import VOCAB, make_checkpoint

SPECIAL = ("<unk>", "<s>", "</s>")
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
"""Bytes that no UTF-8 text has: leaving them out makes room for the special tokens."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_text_model(path: Path) -> Path:
    """Write the checkpoint to `path` and return it."""
    return add_text(make_checkpoint("llama2", path))


def add_text(path: Path) -> Path:
    """Give a checkpoint the tokenizer and the template, and return it."""
    names = [char for char, byte in byte_alphabet().items() if byte not in NEVER_IN_UTF8]
    vocabulary = {name: index for index, name in enumerate((*SPECIAL, *names))}
    assert len(vocabulary) <= VOCAB
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unknown, bos_token=begin, eos_token=end
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path
