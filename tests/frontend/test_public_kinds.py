"""Tokenizers as public checkpoints have them: which tokens, which BOS, which ends."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.structured.grammar import regex_grammar
from twolane.frontend.text.codec import TextError
from twolane.frontend.text.gguf_tokenizer import SPLITTINGS
from twolane.frontend.text.tokenizer import load_both, load_file, load_tokenizer
from twolane.model.load.hub import resolve

from .checkpoints import (
    PIECES,
    byte_level,
    byte_level_keys,
    codec,
    llama2,
    sentencepiece_keys,
    write,
    write_gguf,
)

pytestmark = pytest.mark.usefixtures("converts_here")


NAMED = {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


def test_tokenizer_json_is_not_rebuilt_by_the_name_of_a_class(tmp_path):
    """After transformers#45488: Llama 2's file under `legacy: false`."""
    template = "{% for m in messages %}{{ bos_token + '[' + m['content'] + ']' }}{% endfor %}"
    write(tmp_path / "m", llama2(), **LLAMA, legacy=False, chat_template=template)
    made, file = codec(tmp_path / "m"), llama2()
    for text in ("one", " one", "  two", "  ", "<s>one</s> two", "日本"):
        assert made.encode(text) == file.encode(text).ids
    prompt = file.encode("<s>[hi]", add_special_tokens=False).ids
    assert made.chat([{"role": "user", "content": "hi"}]) == prompt


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize(
    ("bos", "eos", "begins", "ends"),
    [
        (True, False, [1], []),
        (True, True, [1], [2]),
        (False, None, [], []),
        (None, True, [], [2]),
        (None, None, [], []),
    ],
)
def test_the_config_says_whether_texts_begin_with_the_bos(tmp_path, kind, bos, eos, begins, ends):
    """After swift-transformers#161: DeepSeek's distilled models name it there alone."""
    said = {"add_bos_token": bos, "add_eos_token": eos}
    given = {name: value for name, value in said.items() if value is not None}
    plain = processors.ByteLevel(trim_offsets=False)
    write(tmp_path / "m", byte_level(post=plain), tokenizer_class=kind, **NAMED, **given)
    assert codec(tmp_path / "m").encode("b") == [*begins, 3 + ord("b"), *ends]
    file = load_file(resolve(str(tmp_path / "m")))
    assert (file.bos is not None) == bool(begins)


@pytest.mark.parametrize(("said", "begins"), [(None, [1]), (True, [1]), (False, [])])
def test_a_bos_of_the_tokenizer_stays_unless_the_config_says_no(tmp_path, said, begins):
    given = {} if said is None else {"add_bos_token": said}
    write(tmp_path / "m", llama2(), **LLAMA, **given)
    assert codec(tmp_path / "m").encode("hi")[:1] == (begins or [PIECES.index("\u2581hi")])


CHATML = """{% for m in messages %}<|start|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}"""


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token": "<|stop|>"}, {2}),
        ({"eos_token": {"content": "<|stop|>", "lstrip": False}}, {2}),
        ({"eos_token": "<|stop|>", "chat_template": CHATML}, {2, 0}),
        ({"chat_template": CHATML}, {0}),
        ({"chat_template": "{{ messages[-1].content }}"}, set()),
    ],
)
def test_ends_are_those_of_the_tokenizer_and_of_its_template(tmp_path, config, ends):
    """After Qwen3#927 and open-r1 PR #663: the end of a turn is named in one place alone."""
    write(tmp_path / "m", byte_level(), **config)
    assert set(codec(tmp_path / "m").ends) == ends


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path):
    write(tmp_path / "m", byte_level())
    named = {"eos_token": {"content": "<|stop|>"}}
    (tmp_path / "m" / "special_tokens_map.json").write_text(json.dumps(named))
    assert codec(tmp_path / "m").ends == (2,)


@pytest.mark.parametrize(("config", "eos"), [({}, 0), ({"added_tokens_decoder": {}}, 2)])
def test_a_map_of_special_tokens_holds_where_nothing_is_of_the_newer_form(tmp_path, config, eos):
    folder = write(tmp_path / "m", byte_level(), **NAMED, **config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert codec(folder).ends == (eos,) == (theirs.eos_token_id,)


def flags(content, **more):
    """A token as `added_tokens_decoder` has it."""
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **plain, **more}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"260": flags("<tool>", special=True)}},
        {"added_tokens_decoder": {"260": flags("<tool>", lstrip=True, rstrip=True)}},
        {"added_tokens_decoder": {"0": flags("<|end|>"), "260": flags("<tool>")}},
        {"eos_token": {"__type": "AddedToken", **flags("<tool>")}},
        {"eos_token": "<tool>"},
    ],
)
def test_flags_of_declared_tokens_hold_as_in_transformers(tmp_path, config):
    """After OpenHermes, whose file has the end of a turn as plain text."""
    folder = write(tmp_path / "m", byte_level(added=["<tool>"]), **{**NAMED, **config})
    theirs, made = AutoTokenizer.from_pretrained(folder), codec(folder)
    for text in ("a <tool> b<|end|>", "<tool><tool>"):
        tokens = theirs(text).input_ids
        assert made.encode(text) == tokens
        shown = theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert made.decode(tokens, skip_special_tokens=True) == shown
        stream = made.detokenizer()
        assert "".join(map(stream.step, tokens)) + stream.flush() == shown


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["Ġa", "b"]},
        {"extra_special_tokens": ["Ġa", "b"]},
        {"extra_special_tokens": {"a_token": "Ġa", "b_token": "b"}},
        {"extra_special_tokens": [], "additional_special_tokens": ["Ġa"], "image_token": "b"},
        {"additional_special_tokens": None, "extra_special_tokens": ["<tool>"]},
    ],
)
def test_special_tokens_without_a_known_name_are_those_of_transformers(tmp_path, config):
    """After mlx-lm#661: the forms of several versions; pieces of the vocabulary become special."""
    tokenizer = byte_level(added=["<tool>"])
    folder = write(tmp_path / "m", tokenizer, tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs, made = AutoTokenizer.from_pretrained(folder), codec(folder)
    for text in ("aĠab<tool>", "bb a"):
        tokens = theirs(text).input_ids
        assert made.encode(text) == tokens
        assert made.decode(tokens, skip_special_tokens=True) == theirs.decode(
            tokens, skip_special_tokens=True
        )


def test_a_special_token_that_the_tokenizer_lacks_is_noted(tmp_path):
    write(tmp_path / "m", byte_level(), additional_special_tokens=["<lost>"])
    [note] = load_file(resolve(str(tmp_path / "m"))).notes
    assert note == "special token '<lost>' is no token of tokenizer.json"


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", None])
def test_tokens_may_be_added_by_a_file_of_their_own(tmp_path, kind):
    """As `transformers` wrote them before `added_tokens_decoder`; pieces may stand there, too."""
    folder = write(tmp_path / "m", byte_level(), tokenizer_class=kind, eos_token="</tool>")
    added = {"</tool>": 261, "<tool>": 260, "a": 3 + ord("a")}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    made = codec(folder)
    assert made.encode("<tool>b</tool>") == [260, 3 + ord("b"), 261]
    assert made.decode([260, 261], skip_special_tokens=True) == "<tool>"
    assert made.encode(" a") == [259]  # which a token of its own would cut


def test_templates_without_a_default_stop_chat_alone(tmp_path):
    templates = [{"name": "tool_use", "template": "{{ messages[0].content }}"}]
    write(tmp_path / "m", byte_level(), chat_template=templates)
    file = load_file(resolve(str(tmp_path / "m")))
    assert any("no default" in note and "tool_use" in note for note in file.notes)
    made = codec(tmp_path / "m")
    assert not made.has_chat_template
    assert made.encode("a")


def test_a_template_for_tools_serves_conversations_with_tools_alone(tmp_path):
    """As `apply_chat_template` of transformers chooses among templates by name."""
    default, with_tools = (
        "{{ messages[-1].content }}",
        "{{ tools | tojson }}{{ messages[0].content }}",
    )
    templates = [
        {"name": "default", "template": default},
        {"name": "tool_use", "template": with_tools},
        {"name": "rag", "template": "{{ 'never' }}"},
    ]
    folder = write(tmp_path / "m", byte_level(), chat_template=templates)
    theirs, made = AutoTokenizer.from_pretrained(folder), codec(folder)
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    turns = [{"role": "user", "content": "ab"}]
    for given in (None, tools):
        said = theirs.apply_chat_template(turns, tools=given, tokenize=False)
        assert made.decode(made.chat(turns, tools=given), skip_special_tokens=False) == said
    other = folder / "additional_chat_templates" / "tool_use.jinja"
    other.parent.mkdir()
    other.write_text("{{ tools[0].function.name }}{{ messages[0].content }}")
    changed = codec(folder)  # made anew, for a file of the template came
    assert changed.decode(changed.chat(turns, tools=tools), skip_special_tokens=False) == "fab"
    write(tmp_path / "n", byte_level(), chat_template=templates[1:])
    alone = codec(tmp_path / "n")
    assert alone.chat(turns, tools=tools) == made.chat(turns, tools=tools)
    with pytest.raises(TextError, match="no chat template"):
        alone.chat(turns)


def test_a_template_in_a_file_is_found(tmp_path):
    write(tmp_path / "m", byte_level(), chat_template="{{ 'old' }}")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(resolve(str(tmp_path / "m"))).chat_template == "{{ messages[0].content }}"


def test_added_tokens_are_text_whatever_their_characters_are(tmp_path):
    """ "é" is also the name of a byte; the text is what was written."""
    write(tmp_path / "m", byte_level(added=["é", "  ", "Ġword"]))
    made = codec(tmp_path / "m")
    tokens = made.encode("aé  Ġwordb")
    assert len(tokens) == 5
    assert made.decode(tokens, skip_special_tokens=False) == "aé  Ġwordb"
    shown = made.detokenizer()
    assert "".join(map(shown.step, tokens)) == "aé  Ġwordb"


@pytest.mark.parametrize(
    ("prompt", "answer", "shown"),
    [
        ([5, 3 + 0xC3], [3 + 0xA9], "é"),
        ([3 + b for b in "👍".encode()[:3]], [3 + "👍".encode()[3], 3 + ord("b")], "👍b"),
        ([3 + 0xC3], [3 + ord("b")], "b"),
        ([3 + 0xC3], [], ""),
        ([3 + 0xA9], [3 + 0xA9], "\ufffd"),
    ],
)
def test_a_prompt_of_ids_may_end_inside_a_character(tmp_path, prompt, answer, shown):
    """After vllm#48853."""
    write(tmp_path / "m", byte_level())
    detokenizer = codec(tmp_path / "m").detokenizer(prompt)
    assert "".join(map(detokenizer.step, answer)) + detokenizer.flush() == shown


def test_sentencepiece_alone_is_read_or_its_package_is_named(tmp_path):
    """After transformers#36291."""
    write(tmp_path / "m", None)
    (tmp_path / "m" / "tokenizer.model").write_bytes(
        b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
    )
    with pytest.raises(ValueError, match=r"sentencepiece|SentencePiece"):
        codec(tmp_path / "m")


def test_a_tokenizer_in_mistrals_own_form_alone_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "m", None)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer\.json .*: tekken\.json is not read"):
        codec(folder)


WITH_BOS = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
IGNORING_MERGES = WITH_BOS + " minicpm5"
BUILT = (
    "default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 "
    "jina-v5-nano deepseek-llm deepseek-coder deepseek-v3 falcon mpt starcoder gpt-2 phi-2 jina-es "
    "jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert refact command-r qwen2 "
    "deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat glm4 "
    "chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 minerva-7b "
    "megrez gpt-4o llama4 kanana2 talkie trillion granite-docling bailingmoe bailingmoe2 llada-moe "
    "seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm ufakzeka grok-2 minimax-m2 solar-open mellum2"
)
NOT_BUILT = (
    "spark2_5 youtu jais-2 gemma4 granite-embed-multi-311m granite-embed-multi-97m sarvam-moe "
    "jina-v1-en jina-v2-code roberta-bpe whitespace exaone-moe chameleon tiny_aya cohere2moe "
    "superbpe kimi-k2 afmoe laguna"
)
KNOWN = (BUILT + " " + NOT_BUILT).split()
"""Every value of `tokenizer.ggml.pre` in llama.cpp's `llama_vocab::impl::load` (00ad355)."""


def test_every_splitting_is_one_that_llama_cpp_knows():
    assert sorted(SPLITTINGS) == sorted(BUILT.split())


class TestGGUF:
    """The keys of llama.cpp, and its defaults where one is absent."""

    @pytest.mark.parametrize("text", ["one", " one", "  two", "<s>one</s>two", "日本"])
    def test_spaces_are_those_of_sentencepiece(self, tmp_path, text):
        """After llama.cpp#8584: a space before the text and after each special token."""
        made = codec(write_gguf(tmp_path / "m.gguf", **sentencepiece_keys()))
        assert made.encode(text) == llama2().encode(text).ids

    def test_the_space_may_be_left_out(self, tmp_path):
        keys = sentencepiece_keys(ggml__add_space_prefix=False)
        made = codec(write_gguf(tmp_path / "m.gguf", **keys))
        assert made.encode("one") == [1, PIECES.index("one")]
        assert made.decode([PIECES.index("\u2581one")], skip_special_tokens=True) == " one"

    @pytest.mark.parametrize(("said", "begins"), [(None, [1]), (True, [1]), (False, [])])
    def test_sentencepiece_begins_with_token_1_unless_told(self, tmp_path, said, begins):
        more = {} if said is None else {"ggml__add_bos_token": said}
        made = codec(write_gguf(tmp_path / "m.gguf", **sentencepiece_keys(**more)))
        assert made.encode("hi") == [*begins, PIECES.index("\u2581hi")]
        assert 2 in made.ends

    @pytest.mark.parametrize("name", KNOWN)
    def test_each_splitting_that_llama_cpp_knows(self, tmp_path, name):
        keys = byte_level_keys(ggml__pre=name, ggml__bos_token_id=1)
        file = write_gguf(tmp_path / "m.gguf", **keys)
        if name in NOT_BUILT.split():
            with pytest.raises(ValueError, match=f"pre '{name}' is not built; these work: "):
                codec(file)
            return
        made = codec(file)
        assert made.encode("a")[:-1] == ([1] if name in WITH_BOS.split() else [])
        # "12" is a token without a merge: whole only if merges do not matter.
        together = "12" in made.token_names(made.encode("12"))
        assert SPLITTINGS[name].ignore_merges == (name in IGNORING_MERGES.split())
        assert together or name not in IGNORING_MERGES.replace("tekken", "").split()
        for text in ("a b  c\n\n 12 345", "naïve 日本 😀 x\u0301 مرحبا \r\n\t "):
            tokens = made.encode(text)
            assert made.decode(tokens, skip_special_tokens=True) == text

    @pytest.mark.parametrize(
        ("name", "text", "joined"),
        [("qwen2", "12", False), ("llama-bpe", "12", True), ("smollm", "12", False)],
    )
    def test_digits_are_split_as_the_key_says(self, tmp_path, name, text, joined):
        made = codec(write_gguf(tmp_path / "m.gguf", **byte_level_keys(ggml__pre=name)))
        assert len(made.encode(text, add_special_tokens=False)) == (1 if joined else 2)

    def test_ends_are_those_of_the_keys_and_of_known_names(self, tmp_path):
        keys = byte_level_keys(ggml__eos_token_id=2, ggml__eot_token_id=1)
        made = codec(write_gguf(tmp_path / "m.gguf", **keys))
        assert set(made.ends) == {0, 1, 2}  # <|end|> by its name

    def test_ends_of_models_that_go_on_behind_some_of_them(self, tmp_path):
        """`<|end|>` ends a message of gpt-oss, which goes on until a call or its return."""
        for added, others in (
            (["<|call|>", "<|return|>"], {2}),
            (["<|calls|>", "<|flush|>"], {2}),
            (["<|call|>"], {0, 2}),
        ):
            tokens = [*byte_level_keys()["ggml__tokens"], *added]
            kinds = [3] * 3 + [1] * (len(tokens) - 3)
            keys = {"ggml__tokens": tokens, "ggml__token_type": kinds, "ggml__eos_token_id": 2}
            made = codec(write_gguf(tmp_path / "m.gguf", **byte_level_keys(**keys)))
            new = set(range(len(tokens) - len(added), len(tokens)))
            assert set(made.ends) == others | new
            assert made.encode(added[0]) == [min(new)]  # special, though its type is another

    def test_an_end_that_merges_make_is_text_in_a_grammar(self, tmp_path):
        """Qwen's vocabularies have `</s>` as a word, which its name makes special in a file."""
        made = [("<", "/"), ("s", ">"), ("</", "s>")]
        tokens = [*byte_level_keys()["ggml__tokens"], *("".join(merge) for merge in made)]
        keys = {
            "ggml__tokens": tokens,
            "ggml__merges": ["Ġ a", "1 2", *(" ".join(merge) for merge in made)],
            "ggml__token_type": [3] * 3 + [1] * (len(tokens) - 3),
        }
        read = codec(write_gguf(tmp_path / "m.gguf", **byte_level_keys(**keys)))
        assert len(tokens) - 1 in read.ends
        matcher = matcher_of(read.vocabulary().matching([2]), regex_grammar("a</s>b"))
        forced = matcher.compute_ff_tokens()
        assert read.token_names(forced) == ["a", "</", "s", ">", "b"]

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (byte_level_keys(ggml__pre="nope"), "pre 'nope' is not built; these work: "),
            *(
                (byte_level_keys(ggml__model=name), f"model '{name}' is not built")
                for name in ("nope", "bert", "t5", "rwkv", "plamo2", "hybriddna")
            ),
            ({**byte_level_keys(), "ggml__merges": None}, "no tokenizer.ggml.merges"),
            ({**sentencepiece_keys(), "ggml__scores": None}, "no tokenizer.ggml.scores"),
            (byte_level_keys(ggml__tokens=["a"] * 261), "tokens has 'a' more than once"),
            ({**sentencepiece_keys(), "ggml__tokens": None}, "no tokenizer.ggml.tokens"),
        ],
    )
    def test_what_is_missing_or_unknown_is_named(self, tmp_path, keys, message):
        given = {name: value for name, value in keys.items() if value is not None}
        write_gguf(tmp_path / "m.gguf", **given)
        with pytest.raises(ValueError, match=message):
            codec(tmp_path / "m.gguf")

    @pytest.mark.parametrize("keys", [{}, {"ggml__model": "none"}, {"ggml__model": "no_vocab"}])
    def test_a_file_without_a_tokenizer_is_served_by_ids(self, tmp_path, keys):
        file = write_gguf(tmp_path / "m.gguf", general=1, **keys)
        assert load_both(resolve(str(file)))[1] is None

    @pytest.mark.parametrize(
        "text",
        ["one two", " one\n\n  one", "<|turn>one\n<turn|>", "日 x\n", "<bos>one</s>", "\n\n\n"],
    )
    def test_gemma_4_is_that_of_its_tokenizer_json(self, tmp_path, text):
        """BPE of characters with bytes for others, as its published file has it; one text has two
        ids, of which the last counts."""
        merges = [("o", "n"), ("on", "e"), ("\u2581", "one"), ("\n", "\n"), ("\n\n", "\n")]
        merges += [("t", "w"), ("tw", "o"), ("\u2581", "\u2581")]
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool_response>"]
        pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), *"onetwx\n\u2581", "</s>"]
        pieces += ["".join(merge) for merge in merges]
        model = models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )  # fmt: skip
        published = Tokenizer(model)
        published.normalizer = normalizers.Replace(" ", "\u2581")
        published.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        published.add_special_tokens(special)
        keys = {
            "ggml__model": "gemma4",
            "ggml__tokens": [*pieces, "one"],
            "ggml__token_type": [3] * 3 + [2] + [3] * 3 + [6] * 256 + [1] * (len(pieces) - 262),
            "ggml__merges": [" ".join(merge) for merge in merges],
            "ggml__bos_token_id": 2,
            "ggml__add_bos_token": True,
        }
        made = codec(write_gguf(tmp_path / "m.gguf", **keys))
        tokens = made.encode(text, add_special_tokens=False)
        assert made.token_names(tokens) == published.encode(text, add_special_tokens=False).tokens
        assert made.encode(text) == [2, *tokens]
        plain = text.replace("<|turn>", "").replace("<turn|>", "").replace("<bos>", "")
        assert made.decode(tokens, skip_special_tokens=True) == plain
        assert {pieces.index("<turn|>"), pieces.index("<|tool_response>")} <= {*made.ends}
        assert pieces.index("</s>") not in made.ends

    def test_the_template_of_the_file(self, tmp_path):
        keys = byte_level_keys(chat_template=CHATML)
        made = codec(write_gguf(tmp_path / "m.gguf", **keys))
        assert made.has_chat_template
        assert 0 in made.ends
