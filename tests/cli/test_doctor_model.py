"""`twolane doctor MODEL` on small checkpoints: what is read, and where it comes from."""

import json

import pytest

from twolane.cli.doctor_model import describe, ends, report
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import Declared, load_both
from twolane.model.load.hub import resolve
from twolane.model.spec import UnsupportedModel

from ..frontend.checkpoints import byte_level, byte_level_keys, llama2, write, write_gguf

CHATML = """{% for m in messages %}<|start|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}{{ enable_thinking }}"""
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))


def rows(path):
    """Return the rows of the report, without spaces around their names."""
    source = resolve(str(path))
    return [tuple(cell.strip() for cell in row) for row in describe(source, *load_both(source))]


def test_each_end_is_named_with_every_place_that_declares_it(tmp_path):
    folder = write(tmp_path / "m", byte_level(), eos_token="<|stop|>", chat_template=CHATML)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    source = resolve(str(folder))
    file, made = load_both(source)
    found = ends(source, file, made)
    assert found == [
        Declared(2, "<|stop|>", "generation_config.json"),
        Declared(0, "<|end|>", "generation_config.json"),
        Declared(2, "<|stop|>", "config.json"),
        Declared(2, "<|stop|>", "eos_token of tokenizer_config.json"),
        Declared(0, "<|end|>", "the chat template"),
    ]
    served = {*source.spec().eos_token_ids, *TextCodec(made).ends}
    assert {end.id for end in found} == served


def test_an_end_that_is_but_a_default_is_named_so(tmp_path):
    folder = write(tmp_path / "m", byte_level())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert ("EOS", "2 '<|stop|>'", "the default of llama") in rows(folder)


def test_the_formats_of_weights_and_kv_cache(tmp_path):
    folder = write(tmp_path / "m", byte_level())
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**CONFIG, **shape, "hidden_size": 256, "intermediate_size": 512}
    (folder / "config.json").write_text(json.dumps(config))
    found = rows(folder)
    assert ("weights", "not quantised", "quantization_config of config.json") in found
    assert ("KV cache", "1,024 bytes a token in 16 bits", "--kv-cache-dtype auto") in found
    assert ("", "520 bytes a token in FP8", "--kv-cache-dtype fp8") in found
    each = "one for each 1 MiB of a GPU's KV pool, 256 to 1,024"
    assert ("at once", each, "--max-running") in found
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    assert any(row[:2] == ("weights", "fp8") for row in rows(folder))


def test_bos_and_the_form_of_the_template(tmp_path):
    template = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "{{ messages[-1].content[0].text }}"},
    ]
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    folder = write(tmp_path / "m", llama2(), **names, chat_template=template)
    found = rows(folder)
    assert ("BOS", "1 '<s>'", "tokenizer.json") in found
    assert ("template", "", "tokenizer_config.json") in found
    assert ("text", "system, user, assistant", "roles whose content is text") in found
    assert ("variables", "enable_thinking", "chat_template_kwargs") in found
    assert ("tool template", "for conversations with tools", "tool_use") in found
    assert ("parts", "user", "roles whose content is parts") in found


def test_where_transformers_differs_is_logged_by_every_later_server(tmp_path, caplog):
    """After transformers#45488: `LlamaTokenizer` is rebuilt there by its name."""
    folder = write(tmp_path / "m", llama2(), tokenizer_class="Qwen2Tokenizer", eos_token="</s>")
    [(_, said, _)] = [row for row in rows(folder) if row[0] == "transformers"]
    assert "by Qwen2Tokenizer of transformers" in said
    assert ("note", said, "") in rows(folder)


def test_a_gguf_file(tmp_path):
    keys = byte_level_keys(ggml__eos_token_id=2, chat_template=CHATML, ggml__pre="llama-bpe")
    file = write_gguf(tmp_path / "m.gguf", **keys, ggml__bos_token_id=1)
    found = rows(file)
    assert ("BOS", "1 '<|start|>'", "m.gguf") in found
    assert ("EOS", "2 '<|stop|>'", "tokenizer.ggml.eos_token_id") in found
    assert ("EOS", "0 '<|end|>'", "its name") in found
    assert ("EOS", "0 '<|end|>'", "the chat template") in found
    assert ("template", "", "tokenizer.chat_template") in found


def test_tokens_of_a_text(tmp_path, capsys):
    folder = write(tmp_path / "m", byte_level())
    report(str(folder), "a é<|stop|>", None)
    printed = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [(int(token), name) for token, name, _ in printed] == [
        (3 + ord("a"), "a"),
        *((3 + byte, name) for byte, name in zip(b" \xc3\xa9", "ĠÃ©", strict=True)),
        (2, "<|stop|>"),
    ]


def test_what_is_not_served_is_refused_as_by_serve(tmp_path, capsys):
    folder = write(tmp_path / "m", byte_level())
    config = {"architectures": ["PhiForCausalLM"], "quantization_config": {"quant_method": "x"}}
    (folder / "config.json").write_text(json.dumps(config))
    said = "architecture 'PhiForCausalLM': LayerNorm is not built"
    for ask in (lambda: report(str(folder), None, None), resolve(str(folder)).spec):
        with pytest.raises(UnsupportedModel, match=f"^unsupported {said}$"):
            ask()
    report(str(folder), "a", None)
    assert capsys.readouterr().out.split() == [str(3 + ord("a")), "a", "'a'"]
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UnsupportedModel, match=f"^unsupported {said}$"):
        report(str(folder), None, None)


def test_what_has_no_tokenizer_is_refused(tmp_path):
    write(tmp_path / "m", None).joinpath("tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        report(str(tmp_path / "m"), None, None)
