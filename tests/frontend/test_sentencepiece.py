"""Directories with nothing but SentencePiece's `tokenizer.model`, against its own library."""

import io

import pytest

from twolane.frontend.text.tokenizer import load_file
from twolane.model.load.hub import resolve

from .checkpoints import codec, write
from .styles import SAMPLE, texts

library = pytest.importorskip("sentencepiece")
pytest.importorskip("google.protobuf")

LINES = [line for text in SAMPLE for line in text.split("\n") if line] * 3
BPE = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


pytestmark = pytest.mark.usefixtures("converts_here")


def trained(folder, config, **options):
    """Train a model, write it as a directory, and return its own processor."""
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    write(folder, None, **config)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return library.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("trimmed", [True, False])
def test_tokens_and_texts_are_those_of_the_library(tmp_path, legacy, prefix, trimmed):
    spaces = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": trimmed}
    more = {"split_digits": True, "allow_whitespace_only_pieces": True}
    config = {**LLAMA, "legacy": legacy, "add_bos_token": True}
    own = trained(tmp_path / "m", config, **BPE, **spaces, **more)
    made = codec(tmp_path / "m")
    for text in texts(2000, longest=4):
        if any(name in text for name in ("<unk>", "<s>", "</s>")):
            continue  # which are tokens in a prompt, but not for the library
        if prefix and not legacy and text.startswith((" ", "\u2581")):
            continue  # `transformers` puts no further space before one
        if trimmed and "\u2581" in text:
            continue  # the library leaves out some of them while it decodes
        ids = own.encode(text)
        assert made.encode(text) == [1, *ids], text
        whole = own.decode(ids)
        assert made.decode(ids, skip_special_tokens=True) == whole
        stream = made.detokenizer()
        assert "".join(map(stream.step, ids)) + stream.flush() == whole
    assert load_file(resolve(str(tmp_path / "m"))).origin == "tokenizer.model"


@pytest.mark.parametrize(
    ("config", "begins"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, [1]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, []),
        ({"tokenizer_class": "XglmTokenizer"}, []),
        ({}, [1]),
    ],
)
def test_texts_begin_with_the_bos_by_default(tmp_path, config, begins):
    """Which the file cannot say: the class of `transformers` and llama.cpp say so."""
    own = trained(tmp_path / "m", config, **BPE)
    assert codec(tmp_path / "m").encode("fox") == [*begins, *own.encode("fox")]


def test_pieces_may_be_renamed_and_tokens_added_by_other_files(tmp_path):
    """As instruction models put the marks of a chat where the base model reserved pieces."""
    reserved = {"user_defined_symbols": ["<unused0>", "<unused1>"]}
    declared = {"3": {"content": "<turn>", "special": True}, "4": {"content": "<tool>"}}
    config = {**LLAMA, "legacy": False, "added_tokens_decoder": declared}
    own = trained(tmp_path / "m", config, **BPE, **reserved)
    made = codec(tmp_path / "m")
    assert made.encode("<turn>fox<tool>") == [1, 3, own.piece_to_id("fox"), 4]
    assert made.decode([3, 4], skip_special_tokens=True) == "<tool>"
    own = trained(tmp_path / "n", {**LLAMA, "eos_token": "<end>"}, **BPE)
    size = own.get_piece_size()
    (tmp_path / "n" / "added_tokens.json").write_text(f'{{"<end>": {size}, "<s>": 1}}')
    made = codec(tmp_path / "n")
    assert made.encode("fox<end>") == [1, *own.encode("fox"), size]
    assert made.ends == (size,)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_space_follows_each_special_token_if_it_is_legacy(tmp_path, legacy):
    own = trained(tmp_path / "m", {**LLAMA, "legacy": legacy}, **BPE)
    first, *behind = codec(tmp_path / "m").encode("</s>fox", add_special_tokens=False)
    assert first == 2
    assert own.decode(behind) == "fox"
    assert own.id_to_piece(behind[0]).startswith("\u2581") == legacy


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram", "normalization_rule_name": "identity"},
        {"model_type": "bpe", "normalization_rule_name": "nfkc"},
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(tmp_path, options):
    trained(tmp_path / "m", LLAMA, **options)
    with pytest.raises(ValueError, match=r"of SentencePiece with normalisation .*; BPE without"):
        codec(tmp_path / "m")
