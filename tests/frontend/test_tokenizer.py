import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twolane.common.errors import FieldError
from twolane.common.files import write_cache
from twolane.frontend.text.convert import convert
from twolane.frontend.text.tokenizer import _fingerprint, load_file, load_tokenizer
from twolane.model.load.hub import ModelSource, resolve

EOS_KEY = "tokenizer.ggml.eos_token_id"
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
    ids = tokenizer.backend.encode(text).ids
    assert ids == published.encode(text).ids
    assert tokenizer.backend.decode(ids) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text(tokenizer, published, text):
    """The vocabulary lacks bytes that text hardly has (0x06, ...): those are lost, no others."""
    ids = tokenizer.backend.encode(text).ids
    assert ids == published.encode(text).ids
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - published.get_vocab().keys()
    lost = {c for c in text if set(spelled(c)) & missing}
    if not lost:
        assert tokenizer.backend.decode(ids) == text


def spelled(character: str) -> str:
    """A character as byte-level BPE spells it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(character))


def test_the_kept_form_has_the_template_and_the_special_tokens(tokenizer, smollm2):
    file = load_file(smollm2)
    assert file.backend == tokenizer.backend.to_str()
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert file.bos is None
    assert {(end.token, end.source) for end in file.ends} >= {("<|im_end|>", EOS_KEY)}
    assert file.form.text_roles == ("system", "user", "assistant")


def test_a_tokenizer_is_converted_once_and_again_when_its_files_change(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: runs.append(a) or run(*a, **k))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    write_tokenizer(folder, words, "{{ messages }}")
    source = resolve(str(folder))
    first, second = load_tokenizer(source), load_tokenizer(source)
    assert len(runs) == 1
    assert first.chat_template == second.chat_template == "{{ messages }}"
    assert first.backend.to_str() == second.backend.to_str()
    assert first.backend.encode("b").ids == [2]
    write_tokenizer(folder, words, "{{ messages[0].content }}")
    assert load_tokenizer(source).chat_template == "{{ messages[0].content }}"
    assert len(runs) == 2


def test_prompts_are_neither_cut_nor_filled_up(tmp_path, monkeypatch):
    """`tokenizer.json` may keep lengths of training, which `transformers` does not heed."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "[PAD]": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(4)
    words.enable_padding(length=3, pad_id=2)
    write_tokenizer(tmp_path, words, None)
    backend = load_tokenizer(resolve(str(tmp_path))).backend
    assert backend.encode("a a a a a a").ids == [1] * 6
    assert backend.encode("a").ids == [1]


def write_tokenizer(folder, backend, template):
    (folder / "tokenizer.json").write_text(backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_template_that_writes_half_characters_leaves_completions(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    write_tokenizer(tmp_path, words, "{{ '\\ud800' }}")
    said = "the chat template in tokenizer_config.json cannot be run: UnicodeEncodeError"
    assert convert(tmp_path).notes == [said]


@pytest.mark.parametrize("template", [[{"name": "default"}], [5], 5, {"default": 5}])
def test_templates_of_another_form_are_refused_by_name(tmp_path, template):
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    write_tokenizer(tmp_path, words, template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template: "):
        convert(tmp_path)


def test_a_broken_tokenizer_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer: ") as error:
        load_tokenizer(resolve(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_full_disk_is_not_taken_for_a_broken_tokenizer(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    write_tokenizer(tmp_path, words, None)
    command = [sys.executable, "-m", "twolane.frontend.text.convert", "/dev/full", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert re.fullmatch(r"/dev cannot hold its [\d,]+ bytes: .*No space left.*\n", run.stderr)


def test_a_panic_of_the_library_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    form = json.loads(Tokenizer(models.BPE({"x": 0}, [])).to_str())
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}
    form["post_processor"] = template
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    with pytest.raises(ValueError, match="no tokenizer: the tokenizers library failed: ") as error:
        load_tokenizer(resolve(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    write_cache(tmp_path / "file" / "kept.json", b"{}")
    (tmp_path / "kept.json").mkdir()  # what is written cannot take its place
    write_cache(tmp_path / "kept.json", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept.json"]


def test_a_shape_has_no_tokenizer():
    with pytest.raises(ValueError, match="qwen3-8b has no tokenizer"):
        load_tokenizer(resolve("qwen3-8b", "dummy"))


def test_a_chat_template_of_a_file_takes_the_place_of_the_models_own(smollm2, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("{{ messages[0].content }}<|endoftext|>")
    read = load_file(smollm2.with_chat_template(str(file)))
    assert (read.chat_template, read.template_source) == (file.read_text(), str(file))
    assert "<|im_start|>" in load_file(smollm2).chat_template
    file.write_text("{% if")
    with pytest.raises(ValueError, match=f"the chat template in {file} is broken"):
        load_file(smollm2.with_chat_template(str(file)))
    for source, wrong in ((smollm2, str(tmp_path)), (replace(smollm2, tokenizer=None), str(file))):
        with pytest.raises(FieldError, match="chat_template"):
            source.with_chat_template(wrong)


def test_a_kept_tokenizer_is_named_by_what_its_files_contain(tmp_path):
    """Layers of images and `rsync -t` keep times, and another file may have the same length."""
    file = tmp_path / "tokenizer.json"
    file.write_text('{"a": 1, "b": 2}')
    source = ModelSource("dir", "m", None, tmp_path)
    before, times = _fingerprint(source), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_text('{"a": 2, "b": 1}')
    os.utime(file, ns=times)
    after = _fingerprint(source)
    assert before != after
    os.utime(file, ns=(1, 1))
    assert _fingerprint(source) == after
