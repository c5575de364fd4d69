"""Tokens, pieces and streamed texts of public styles of tokenizers, against the library's."""

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import load_file, read_file
from twolane.model.load.hub import resolve

from .checkpoints import codec, write
from .styles import STYLES, texts

SHORT = list(texts(600, longest=4))


pytestmark = pytest.mark.usefixtures("converts_here")


def texts_of_tokens(codec):
    """What grammars take tokens for; None: the tokenizer's decoder rules grammars out."""
    try:
        vocabulary = codec.vocabulary()
    except ValueError as error:
        assert "may change a token's text" in str(error)
        return lambda ids: None
    texts = vocabulary.texts
    if vocabulary.exact is not None:
        exact = vocabulary.matching([0]).tokenizer
        for text in [*SHORT[:200], *names_of(codec)]:
            ids = exact.tokenize_str(text)
            assert b"".join(texts[token] for token in ids) == text.encode(), text
            assert not {*ids} & {*vocabulary.special}
    return lambda ids: b"".join(texts[token] for token in ids)


def names_of(codec):
    return [f"a {name} b" for name in codec.added_tokens]


def check(folder, style, given):
    """Compare all texts with the file and, if it agrees, with `transformers`."""
    made, file = codec(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    data = msgspec.json.encode(load_file(resolve(str(folder))))
    decodes = TextCodec(read_file(data, decodes_only=True)[1])  # as in the API process
    whole_of = texts_of_tokens(decodes)
    theirs = AutoTokenizer.from_pretrained(folder) if style.transformers else None
    batch = theirs(given).input_ids if theirs is not None else [None] * len(given)
    for text, encoding, others in zip(given, file.encode_batch(given), batch, strict=True):
        ids = made.encode(text)
        assert ids == encoding.ids, text
        names = [file.id_to_token(token) for token in ids]
        assert made.token_names(ids) == decodes.token_names(ids) == names
        assert others in (None, ids), text
        for skip in (True, False):
            whole = file.decode(ids, skip_special_tokens=skip)
            assert made.decode(ids, skip_special_tokens=skip) == whole, text
            stream = decodes.detokenizer(skip_special_tokens=skip)
            assert "".join(map(stream.step, ids)) + stream.flush() == whole, text
        constrained = decodes.detokenizer(skip_special_tokens=False, keep_space=True)
        shown = "".join(map(constrained.step, ids)) + constrained.flush()
        assert whole_of(ids) in (shown.encode(), None), text


@pytest.mark.parametrize("name", STYLES)
def test_tokens_and_texts_are_those_of_the_file(tmp_path, name):
    style = STYLES[name]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **style.config}
    check(write(tmp_path / "m", style.make(), **config), style, SHORT)


@pytest.mark.full
@pytest.mark.parametrize("name", STYLES)
def test_long_texts_of_each_style(tmp_path, name):
    style = STYLES[name]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **style.config}
    given = list(texts(5_000, longest=24, seed=1))
    check(write(tmp_path / "m", style.make(), **config), style, given)


def test_there_are_thirty_styles():
    assert len(STYLES) >= 30
    files = {style.make().to_str() for style in STYLES.values()}
    assert len(files) == len(STYLES) - 1  # Llama 2's is there with two configs
