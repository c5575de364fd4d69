import json
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.server.serving import PATIENCE
from twolane.engine.messages import Output
from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.text.codec import (
    TextCodec,
    TextError,
    WindowDetokenizer,
    byte_alphabet,
    guarded,
    with_whole_characters,
)
from twolane.frontend.text.jobs import Loaded
from twolane.frontend.text.output_reader import OutputReader, TextOptions
from twolane.frontend.text.texts import Texts
from twolane.frontend.text.tokenizer import ModelTokenizer
from twolane.sampling import SamplingParams

VOCABULARY = 49152
ANY = SamplingParams()


@pytest.fixture(scope="module")
def codec(tokenizer):
    """Made once: it looks at every token of the vocabulary."""
    return TextCodec(tokenizer)


def pieces(detokenizer, tokens):
    return [*(detokenizer.step(token) for token in tokens), detokenizer.flush()]


@given(tokens=st.lists(st.integers(0, VOCABULARY + 10), max_size=60))
def test_pieces_of_any_tokens_make_the_full_decode(codec, tokenizer, tokens):
    whole = tokenizer.backend.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(codec.detokenizer(), tokens)) == whole


@given(text=st.text(max_size=80))
def test_pieces_of_any_text_make_the_full_decode(codec, tokenizer, text):
    # A piece that ended inside a character would leave a replacement character behind.
    tokens = tokenizer.backend.encode(text, add_special_tokens=False).ids
    whole = tokenizer.backend.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(codec.detokenizer(), tokens)) == whole


def test_an_emoji_comes_whole(codec, tokenizer):
    tokens = tokenizer.backend.encode("👍🏽").ids
    assert len(tokens) > 2
    assert [p for p in pieces(codec.detokenizer(), tokens) if p] == ["👍", "🏽"]


def test_no_mark_stands_for_what_the_prompt_breaks_off_and_nothing_completes(codec, tokenizer):
    first, second, letter = map(tokenizer.backend.token_to_id, "ðŁa")
    for rest, text in (
        ([letter], "a"),
        ([second, letter], "a"),
        ([letter, first, letter], "a\ufffda"),
    ):
        assert "".join(pieces(codec.detokenizer([first]), rest)) == text


def test_special_tokens_have_no_text(codec, tokenizer):
    tokens = tokenizer.backend.encode("<|im_start|>a<|im_end|>").ids
    assert "".join(pieces(codec.detokenizer(), tokens)) == "a"


@pytest.fixture(scope="module")
def sentencepiece():
    """A byte-fallback tokenizer with decoders as Llama 2 has them."""
    words = ["▁the", "▁cat", "s", "▁", "é", "a", "b"]
    vocabulary = {"<unk>": 0}
    vocabulary |= {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: 257 + place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_sentencepiece_keeps_inner_spaces(sentencepiece):
    parts = pieces(WindowDetokenizer(sentencepiece), [257, 258, 259, 260, 261])
    assert parts == ["the", " cat", "s", " ", "é", ""]


def test_the_space_behind_a_prompt_is_shown(sentencepiece):
    """As in vLLM; the decoder drops that of the text's first word."""
    assert pieces(WindowDetokenizer(sentencepiece, [257]), [258, 259]) == [" cat", "s", ""]
    assert pieces(WindowDetokenizer(sentencepiece, [257] * 99), [260, 260]) == [" ", " ", ""]
    assert pieces(WindowDetokenizer(sentencepiece), [258, 259]) == ["cat", "s", ""]
    codec = TextCodec(ModelTokenizer(sentencepiece, None, {}))
    reader = OutputReader(0, codec, [257], SamplingParams(), TextOptions(), ())
    assert reader.read(Output("id", [258, 259])).text == " cats"


def reader(sentencepiece, params=ANY, **options):
    codec = TextCodec(ModelTokenizer(sentencepiece, None, {}))
    return OutputReader(0, codec, [257], params, TextOptions(**options), (263,))


@pytest.mark.parametrize(("include_stop", "text"), [(False, " cat"), (True, " catsa")])
def test_a_stop_string_ends_an_answer_where_it_begins(sentencepiece, include_stop, text):
    read = reader(sentencepiece, stop=("sa",), include_stop=include_stop)
    delta = read.read(Output("id", [258, 259, 262, 263]))
    assert (delta.text, delta.finish, delta.stop_reason) == (text, "stop", "sa")
    assert (delta.tokens, delta.offsets) == ([258, 259, 262], [0, 4, 5])
    assert (read.stopped, read.count) == (True, 3)


@pytest.mark.parametrize(
    ("data", "shown", "byte_level", "by_bytes"),
    [
        (b"\xe6a", "\ufffda", [0, 1], [0, 1]),
        (b"\xe6\xe6\x97\xa5a", "\ufffd日a", [0, 1, 1, 1, 2], [0, 1, 1, 1, 4]),
        (b"\xf0\x9f\x98\x80a", "\U0001f600a", [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]),
        (b"\xe6\x97", "\ufffd", [0, 0], [0, 0]),
    ],
)
def test_a_token_after_a_broken_character_begins_after_its_mark(
    codec, tokenizer, sentencepiece, data, shown, byte_level, by_bytes
):
    names = {byte: name for name, byte in byte_alphabet().items()}
    one = [tokenizer.backend.token_to_id(names[byte]) for byte in data]
    other = [262 if byte == ord("a") else byte + 1 for byte in data]
    windowed = TextCodec(ModelTokenizer(sentencepiece, None, {}))
    for of, tokens, offsets in ((codec, one, byte_level), (windowed, other, by_bytes)):
        for finish, end in (("length", []), ("stop", [263])):
            read = OutputReader(0, of, [], SamplingParams(), TextOptions(), (263,))
            news = [*([token] for token in tokens), end] if end else [[token] for token in tokens]
            deltas = [
                read.read(Output("id", new, finish if place == len(news) else None))
                for place, new in enumerate(news, 1)
            ]
            text = "".join(delta.text for delta in deltas)
            assert of is windowed or text == shown
            after = [len(text)] if end else []
            found = [offset for delta in deltas for offset in delta.offsets]
            assert found == [*offsets, *after]


def test_what_may_begin_a_stop_string_is_shown_with_what_follows_or_at_the_end(sentencepiece):
    read = reader(sentencepiece, stop=("sab", "ss"))
    news = ([258, 259], None), ([262, 262], None), ([259], "length")
    deltas = [read.read(Output("id", tokens, finish)) for tokens, finish in news]
    assert [delta.text for delta in deltas] == [" cat", "saa", "s"]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("length", None)
    assert not read.stopped


def test_stop_strings_are_looked_for_from_the_least_number_of_tokens_on(sentencepiece):
    delta = reader(sentencepiece, SamplingParams(min_tokens=3), stop=("s",)).read(
        Output("id", [259, 262, 259, 262])
    )
    assert (delta.text, len(delta.tokens), delta.stop_reason) == ("sa", 3, "s")


@pytest.mark.parametrize(
    ("token", "include_stop", "text", "reason"),
    [(259, False, " cat", 259), (259, True, " cats", 259), (263, False, " cat", None)],
)
def test_the_token_that_ends_an_answer_is_its_reason_unless_all_answers_end_so(
    sentencepiece, token, include_stop, text, reason
):
    read = reader(sentencepiece, include_stop=include_stop)
    delta = read.read(Output("id", [258, token], "stop"))
    assert (delta.text, delta.tokens, delta.finish) == (text, [258, token], "stop")
    assert delta.stop_reason == reason


def test_an_end_token_that_is_ignored_is_a_reason_like_others(sentencepiece):
    read = reader(sentencepiece, SamplingParams(ignore_eos=True, stop_token_ids=(263,)))
    assert read.read(Output("id", [258, 263], "stop")).stop_reason == 263


@pytest.mark.parametrize(
    ("said", "stop", "text"), [("the cats", "ca", "the "), ("the\xe6", "\ufffd", "the")]
)
def test_a_stop_string_may_come_with_the_last_news(sentencepiece, said, stop, text):
    """Also in what is only known to be text when nothing follows."""
    tokens = [byte + 1 for byte in said.encode("latin-1")]
    delta = reader(sentencepiece, stop=(stop,)).read(Output("id", tokens, "length"))
    assert (delta.text, delta.finish, delta.stop_reason) == (text, "stop", stop)


def test_stop_strings_do_not_count_while_the_model_thinks(sentencepiece):
    for said, shown in (("<think>sa</think> as", "<think>sa</think> a"), ("<thi", "<thi")):
        read = reader(sentencepiece, stop=("s",), thinking=ThinkingMarks())
        news = Output("id", [byte + 1 for byte in said.encode()], "length")
        assert read.read(news).text == shown


@pytest.mark.parametrize(
    ("stop", "said", "text", "stops"),
    [
        ("<|im_start|>", "a<|im_start|>b", "a", True),
        ("\n<|im_start|>user", "a\n<|im_start|>userb", "a", True),
        ("\n<|im_start|>user", "a\n<|im_start|>b", "a\nb", False),
        ("<|im_end|><|im_start|>", "<|im_end|><|im_end|><|im_start|>a", "", True),
        ("x", "a<|im_start|>x", "a", True),
        ("<|im_start|>", "<think><|im_start|>a</think>b<|im_start|>c", "<think>a</think>b", True),
        ("<|im_start|>", "<th<|im_start|>a", "<th", True),
    ],
)
def test_special_tokens_are_part_of_stop_strings_and_not_of_the_text(
    codec, tokenizer, stop, said, text, stops
):
    """Frontends stop at the marks of a chat, which a base model may write, too."""
    for include in (False, True):
        how = ThinkingMarks() if "<th" in said else None
        options = TextOptions(stop=(stop,), include_stop=include, thinking=how)
        read = OutputReader(0, codec, [], ANY, options, ())
        deltas = []
        for token in tokenizer.backend.encode(said).ids:
            deltas.append(read.read(Output("id", [token])))
            if read.stopped:
                break
        else:
            deltas.append(read.read(Output("id", [], "length")))
        shown = text + stop if include and stops else text
        assert "".join(delta.text for delta in deltas) == shown
        assert deltas[-1].stop_reason == (stop if stops else None)
    early = SamplingParams(min_tokens=9)
    read = OutputReader(0, codec, [], early, options, ())
    assert read.read(Output("id", tokenizer.backend.encode(said).ids[:8])).finish is None


def test_a_character_that_the_prompt_breaks_off_is_shown(sentencepiece):
    first, second, third = (byte + 1 for byte in "日".encode())
    for prompt, rest in ([first], [second, third]), ([257, first, second], [third]):
        detokenizer = WindowDetokenizer(sentencepiece, prompt)
        assert "".join(pieces(detokenizer, [*rest, 258])) == "日 cat"


@given(text=st.text(alphabet="the cats é日本👍", max_size=30))
def test_window_pieces_make_the_full_decode(sentencepiece, text):
    tokens = [byte + 1 for byte in text.encode()]
    detokenizer = WindowDetokenizer(sentencepiece)
    parts = [detokenizer.step(token) for token in tokens]
    assert all("\ufffd" not in part for part in parts)
    whole = sentencepiece.decode(tokens, skip_special_tokens=True)
    assert "".join(parts) + detokenizer.flush() == whole


def test_special_tokens_of_sentencepiece_are_hidden_unless_asked_for(sentencepiece):
    made = Tokenizer.from_str(sentencepiece.to_str())
    made.add_special_tokens(["<s>"])
    special = made.token_to_id("<s>")
    for skip, text in ((True, "the cat"), (False, "the<s> cat")):
        detokenizer = WindowDetokenizer(made, skip_special_tokens=skip)
        assert "".join(pieces(detokenizer, [257, special, 258])) == text
    assert "".join(pieces(WindowDetokenizer(made, [257, special]), [258])) == " cat"


def test_broken_bytes_are_not_held_for_ever(sentencepiece):
    detokenizer = WindowDetokenizer(sentencepiece)
    assert "".join(detokenizer.step(0x80 + 1) for _ in range(99))
    assert len(detokenizer._window) < 20


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError, TextError),
        (type("PanicException", (BaseException,), {}), TextError),
        (MemoryError, MemoryError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_a_tokenizer_that_fails_or_panics_is_a_refusal(raised, seen):
    def fails():
        raise raised("no such token")

    with pytest.raises(seen, match="no such token") as error:
        guarded(fails)
    assert type(error.value) is seen


@pytest.mark.parametrize(
    ("text", "whole"), [("é\ud83d", "é\ufffd"), ("\ud83d\ude00\ude00", "😀\ufffd"), ("é😀", "é😀")]
)
def test_halves_of_characters_are_marked(text, whole):
    assert with_whole_characters(text) == whole


def test_without_a_tokenizer_text_is_refused():
    codec = TextCodec(None)
    assert pieces(codec.detokenizer(), [1, 2]) == ["", "", ""]
    with pytest.raises(TextError, match="without a tokenizer"):
        codec.encode("x")
    with pytest.raises(TextError, match="without a tokenizer"):
        codec.chat([{"role": "user", "content": "x"}])


def test_chat_uses_the_template(codec, tokenizer):
    tokens = codec.chat([{"role": "user", "content": "Hi"}])
    text = tokenizer.backend.decode(tokens, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def with_template(tokenizer, template):
    return TextCodec(ModelTokenizer(tokenizer.backend, template, tokenizer.special_tokens))


def test_a_template_that_fails_is_a_refusal(tokenizer):
    codec = with_template(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="roles must alternate"):
        codec.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "refusal",
    [
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}",
        "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}",
    ],
)
def test_messages_of_the_system_in_front_are_one_where_the_template_takes_one(tokenizer, refusal):
    template = "{% for m in messages %}WAY{{ m.role }}: {{ m.content }}\n{% endfor %}"
    codec = with_template(tokenizer, template.replace("WAY", refusal))
    first, second = {"role": "system", "content": "Be"}, {"role": "developer", "content": ["nice"]}
    hello = {"role": "user", "content": "Hello"}
    assert decoded(codec, [first, second, hello]) == "system: Be\n\nnice\nuser: Hello\n"
    assert decoded(codec, [first, hello, second]) == "system: Be\nuser: Hello\nuser: nice\n"
    free = with_template(tokenizer, template.replace("WAY", ""))
    assert decoded(free, [first, first, hello]) == "system: Be\nsystem: Be\nuser: Hello\n"


def test_messages_of_the_user_are_one_where_turns_must_alternate(tokenizer):
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate!') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    codec = with_template(tokenizer, template)
    turns = [{"role": role, "content": role} for role in ("user", "user", "assistant", "user")]
    assert decoded(codec, turns) == "user: user\n\nuser\nassistant: assistant\nuser: user\n"
    both = "user: user\n\nuser\nassistant: assistant\n\nassistant\n"
    assert decoded(codec, [*turns[:3], turns[2]]) == both
    with pytest.raises(TextError, match="alternate!"):
        codec.chat([{**turns[0], "name": "Ann"}, *turns[1:]])


def decoded(codec, messages):
    return codec.decode(codec.chat(messages), skip_special_tokens=False)


@pytest.mark.parametrize("template", ["{% if %}", None])
def test_without_a_whole_template_completions_go_on(tokenizer, template):
    codec = with_template(tokenizer, template)
    assert not codec.has_chat_template
    assert codec.encode("Hi") == tokenizer.backend.encode("Hi").ids
    with pytest.raises(TextError, match=r"template is broken|no chat template"):
        codec.chat([{"role": "user", "content": "Hi"}])


NAMED = """{% for m in messages %}{{ m.name + ': ' if m.name }}{{ m.content }}
{% endfor %}{{ 'think' if enable_thinking }}"""


def test_variables_of_the_template(tokenizer):
    codec = with_template(tokenizer, NAMED)
    turns = [{"role": "user", "content": "Hi"}]
    plain, thinking = (
        codec.decode(codec.chat(turns, variables=v), skip_special_tokens=False)
        for v in (None, {"enable_thinking": True})
    )
    assert (plain, thinking) == ("Hi\n", "Hi\nthink")
    with pytest.raises(TextError, match="has no variable 'enable_thinkign'") as refusal:
        codec.chat(turns, variables={"enable_thinkign": True})
    assert refusal.value.param == "chat_template_kwargs"
    for reserved in ("messages", "add_generation_prompt", "tools"):
        with pytest.raises(TextError, match="has no variable"):
            codec.chat(turns, variables={reserved: []})


def test_variables_of_a_template_for_tools(tokenizer):
    """They are those that it reads itself, and not those of the default template."""
    source = "{{ messages[0].content }}{{ tools[0].function.name }}{{ 'think' if thinking }}"
    codec = TextCodec(replace(tokenizer, chat_template=NAMED, tool_template=source))
    assert codec.template_variables(tools=False) == {"enable_thinking"}
    assert codec.template_variables(tools=True) == {"thinking"}
    tool = {"type": "function", "function": {"name": "f"}}
    told = codec.chat([{"role": "user", "content": "Hi"}], variables={"thinking": 1}, tools=[tool])
    assert codec.decode(told, skip_special_tokens=False) == "Hifthink"
    assert with_template(tokenizer, NAMED).template_variables(tools=True) == {"enable_thinking"}
    loaded = Loaded(b"", source, False, True, frozenset({"a"}), frozenset({"b"}))
    texts = Texts(TextCodec(None), None, loaded)
    known = [[texts.has_variable(name, tools=tools) for name in "ab"] for tools in (False, True)]
    assert known == [[True, False], [False, True]]


def test_names_are_given_to_the_template(tokenizer):
    turns = [{"role": "user", "content": "Hi", "name": "Ann"}]
    codec = with_template(tokenizer, NAMED)
    assert codec.decode(codec.chat(turns), skip_special_tokens=False) == "Ann: Hi\n"
    unnamed = TextCodec(tokenizer)
    assert unnamed.chat(turns) == unnamed.chat([{"role": "user", "content": "Hi"}])


def test_a_switch_that_is_off_asks_for_nothing_where_there_is_none(tokenizer):
    codec = with_template(tokenizer, "{{ messages[0].content }}")
    turns = [{"role": "user", "content": "Hi"}]
    assert codec.chat(turns, variables={"enable_thinking": False}) == codec.chat(turns)
    for name, value in ("enable_thinking", True), ("enable_thinkign", False):
        with pytest.raises(TextError, match=f"has no variable '{name}'"):
            codec.chat(turns, variables={name: value})
    with pytest.raises(TextError, match="has no variable 'other'"):
        codec.chat(turns, variables={"enable_thinking": False, "other": 1})


def calls(*names):
    return [{"function": {"name": name, "arguments": {}}} for name in names]


@pytest.mark.parametrize(
    ("template", "turns", "param"),
    [
        (
            "{{ messages[-1].content }}",
            [{"role": "user", "content": "lost words"}, {"role": "assistant", "content": "Hi"}],
            "messages[0].content",
        ),
        ("{{ messages[0].content[:2] }}", [{"role": "user", "content": "Hi, all"}], "messages[0]"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "It is"}],
            "messages[1].content",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": calls("f"),
                }
            ],
            "messages[0].tool_calls",
        ),
        (
            "{% for m in messages %}{{ m.content or '' }}"
            "{{ m.tool_calls[0] | tojson if m.tool_calls and loop.first }}{% endfor %}",
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": calls("look_up", "calculate"),
                }
            ],
            "messages[0].tool_calls",
        ),
        (
            "{{ messages[0].content }}",
            [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "lost words"}],
            "messages[1].content",
        ),
    ],
)
def test_a_prompt_that_lacks_what_was_said_is_refused(tokenizer, template, turns, param):
    with pytest.raises(TextError, match="does not show") as refusal:
        with_template(tokenizer, template).chat(turns)
    assert refusal.value.param.startswith(param)


CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""
ALTERNATING = """{%- if messages[0].role == 'system' %}
{{- raise_exception('no system') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}{% endfor %}"""
"""A template without a place for the system, for tools or for calls."""


def test_tools_are_told_of_where_a_template_has_no_place_for_them(tokenizer):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    turns = [
        {"role": "user", "content": ["Look", "it up"]},
        {"role": "assistant", "content": None, "tool_calls": [*calls("look_up"), *calls("more")]},
        {"role": "tool", "tool_call_id": "a", "content": "found <it>"},
        {"role": "tool", "tool_call_id": "b", "content": ["and", "more"]},
        {"role": "user", "content": "Thanks"},
    ]
    for template, start in (
        (ALTERNATING, "[user]# Tools"),
        (CHATML, "<|im_start|>system\n# Tools"),
    ):
        codec = with_template(tokenizer, template)
        assert not codec.shows_tools
        shown = codec.chat(turns, tools=[tool], tools_as_text=True)
        text = codec.decode(shown, skip_special_tokens=False)
        assert text.startswith(start)
        for part in (
            f"<tools>\n{json.dumps(tool)}\n</tools>",
            "</tool_call>\n\nLook\nit up" if template == ALTERNATING else "Look\nit up<|im_end|>",
            '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name"',
            "<tool_response>\nfound <it>\n</tool_response>\n<tool_response>\nand\nmore\n</tool",
        ):
            assert part in text
        with_system = [{"role": "system", "content": "Be brief."}, *turns]
        shown = codec.chat(with_system, tools=[tool], tools_as_text=True)
        text = codec.decode(shown, skip_special_tokens=False)
        assert text.startswith(start.replace("# Tools", "Be brief.\n\n# Tools"))


def test_calls_are_not_taken_for_shown_since_somebody_names_the_function(tokenizer):
    turns = [
        {"role": "user", "content": "Call look_up"},
        {"role": "assistant", "content": "", "tool_calls": calls("look_up")},
    ]
    codec = with_template(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TextError, match="does not show tool calls") as refusal:
        codec.chat(turns)
    assert refusal.value.param == "messages[1].tool_calls"


@pytest.mark.parametrize("shown", ["trim", "tojson", "e", "replace('\n', ' ')"])
def test_a_template_may_write_words_in_its_own_way(tokenizer, shown):
    codec = with_template(tokenizer, "{{ messages[0].content | " + shown + " }}")
    for said in ('  "Grüße" <b>&\n\tan\\alle </b> \n', "\n", "x " * 10_000):
        assert codec.chat([{"role": "user", "content": said}]) is not None


def test_least_tokens_is_a_bound(codec):
    for text in ("", "a", " " * 1000, "\n" * 999, "The cat. " * 300, "==========" * 100):
        assert codec.min_tokens_of(len(text)) <= len(codec.encode(text))
    assert codec.min_tokens_of(10**6) > 1000
    assert TextCodec(None).min_tokens_of(1) == 0


def test_special_tokens_are_shown_on_demand(codec):
    tokens = codec.encode("<|im_start|>a<|im_end|>")
    shown = "".join(pieces(codec.detokenizer(skip_special_tokens=False), tokens))
    assert shown == "<|im_start|>a<|im_end|>" == codec.decode(tokens, skip_special_tokens=False)
    assert codec.decode(tokens, skip_special_tokens=True) == "a"


def test_bytes_of_sentencepiece_tokens(sentencepiece):
    codec = TextCodec(ModelTokenizer(sentencepiece, None, {}))
    assert [codec.token_bytes(token) for token in (257, 0xC3 + 1, 0, 9999)] == [
        *(b" the", b"\xc3", b"<unk>", b"")
    ]


def has_turns_beside(work):
    """Do `work` in a thread that loses the interpreter's lock where it gives it away alone; return
    whether this thread had a turn meanwhile."""
    at_work, seen, before = threading.Event(), threading.Event(), sys.getswitchinterval()

    def run():
        at_work.set()
        work(seen)
        at_work.clear()

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            if at_work.is_set():
                seen.set()
    finally:
        sys.setswitchinterval(before)
    return seen.is_set()


def test_other_threads_go_on_while_a_long_text_is_tokenised(codec, tokenizer):
    """The library's function for one text keeps the lock."""
    text, end = " ".join(f"{number:x}" for number in range(40_000)), time.monotonic() + PATIENCE

    def encode(seen):
        while not seen.is_set() and time.monotonic() < end:
            codec.encode(text)

    assert has_turns_beside(encode)
    assert not has_turns_beside(lambda seen: tokenizer.backend.encode(text))


def test_a_long_text_has_the_tokens_of_a_short_one(codec, tokenizer):
    text = "<|im_start|>user\nnaïve 👍🏽  twice<|im_end|>\n" * 50
    tokens = tokenizer.backend.encode(text).ids
    assert codec.encode(text) == tokens
    assert codec.decode(tokens, skip_special_tokens=False) == text
