import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twolane.model.hub import resolve
from twolane.model.tokenizer import load_tokenizer

TEXTS = [
    "What is the capital of France?",
    "In 2024 there were  12345 cats, 3.14 of them\n\n\n 7\t8  9 ",
    "  two leading spaces, two trailing  ",
    "\n\n  x = 1\n\ty = 22 \r\n",
    "😀🏳️‍🌈 naïve café e\u0301 你好,世界 ½ ²³ Ⅷ ٣٤",
    "I don't, we'll; THEY'VE <|not special|> ▁ <0x0A>",
    "",
    " ",
    "1",
    "a1b22c333",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def published(smollm2):
    """SmolLM2's own tokenizer.json, rebuilt: digits apart, then byte-level BPE."""
    fields = GGUFReader(smollm2.path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    vocab = {token: i for i, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in merges]))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    built.decoder = decoders.ByteLevel()
    return built


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_published_tokenizer(tokenizer, published, text):
    ids = tokenizer.encode(text)
    assert ids == published.encode(text).ids
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text(tokenizer, published, text):
    """The vocabulary lacks bytes that text hardly has (0x06, ...): those are lost, no others."""
    ids = tokenizer.encode(text)
    assert ids == published.encode(text).ids
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - published.get_vocab().keys()
    lost = {c for c in text if set(spelled(c)) & missing}
    if not lost:
        assert tokenizer.decode(ids) == text


def spelled(character: str) -> str:
    """A character as byte-level BPE spells it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(character))


def test_special_tokens_and_chat_template(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2


def test_a_shape_has_no_tokenizer():
    with pytest.raises(ValueError, match="qwen3-8b has no tokenizer"):
        load_tokenizer(resolve("qwen3-8b", "dummy"))
