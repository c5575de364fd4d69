import json
from functools import partial
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twolane.frontend.answer_formats import FormatOptions, ModelFormats
from twolane.frontend.parsers import unclosed
from twolane.frontend.parsers.json_call import JsonCall, arguments_object
from twolane.frontend.parsers.json_prefix import ObjectPrefix
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content, Reasoning
from twolane.frontend.parsers.readers import XmlCall, typed
from twolane.frontend.parsers.reasoning import (
    KNOWN_MARKS,
    ReasoningParser,
    ThinkingMarks,
    ends_in_thinking,
    thinking_of,
)
from twolane.frontend.parsers.tool_calls import FORMATS, CallFormat, ToolCallParser, format_of
from twolane.frontend.parsers.unclosed import CallsInThinking
from twolane.frontend.structured.tools import Tool
from twolane.server.options import ToolForm

TYPES = {
    "weather": {"city": frozenset(("string",)), "days": frozenset(("integer",))},
    "f": {
        "maybe": frozenset(("string", "null")),
        "either": frozenset(("string", "number")),
        "sure": frozenset(("boolean",)),
    },
}
HERMES = """I look it up.

<tool_call>
{"name": "weather", "arguments": {"city": "São \\"Paulo\\" {", "days": [3, {"a": 1}]}}
</tool_call>
<tool_call>
{"arguments": {"x": "</tool_call>"}, "name": "f"}
</tool_call>"""
XML = """Now:
<tool_call>
<function=weather>
<parameter=city>
12
</parameter>
<parameter=days>
12
</parameter>
</function>
</tool_call>
done"""
DAYS = "<function=weather><parameter=days>\n{}\n</parameter></function>"
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "f", "parameters": {}}'
MISTRAL = (
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, '
    '{"name": "f", "arguments": {}}]'
)
GRANITE = "<|tool_call|>"
GRANITE_CALLS = (
    f'{GRANITE}{{"name": "weather", "arguments": {{"city": "Rome"}}}}<|/tool_call|>'
    f'{GRANITE}{{"name": "f", "arguments": {{}}}}<|/tool_call|>'
)
MISTRAL_NEW = 'Ok.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]f{"a": "}"}'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
PYTHONIC = '[weather(city="Rome"), f()]'
GLM45 = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n"
    "<tool_call>f\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'
)
MINICPM5 = (
    '<function name="weather"><param name="city">Rome</param></function>\n'
    '<function name="f"></function>'
)
GLM = 'weather\n{"city": "Rome"}<|assistant|>f\n{}<|observation|>'
CALL = '<tool_call>{"name": "f", "arguments": '
PYTHON_OBJECT = """{'city': 'it\\'s "Rome"', "days": [1, 2 , ], "warm": True, 'wet': None, }"""
PYTHON_READ = {"city": 'it\'s "Rome"', "days": [1, 2], "warm": True, "wet": None}
DEEP = {"a": ['"}', {"b": None}]}
SOME = {"maybe": "12", "either": 3, "sure": True}
UNMARKED = """Now:
<function=f>
<parameter=maybe>
12
</parameter>
<parameter=either>
3
</parameter>
<parameter=sure>
True
</parameter>
</function>
</tool_call>
<function=f>
<parameter=x>
1
</parameter>
</function>"""
ROME = [("weather", {"city": "Rome"}), ("f", {})]
WRITTEN = {
    "an object as in Python": (
        ("hermes", f"<tool_call>{{'name': 'weather', 'arguments': {PYTHON_OBJECT}}}</tool_call>"),
        "",
        [("weather", PYTHON_READ)],
    ),
    "an object as in Python, behind a name": (
        ("mistral_args", f"[TOOL_CALLS]weather[ARGS]{PYTHON_OBJECT}"),
        "",
        [("weather", PYTHON_READ)],
    ),
    "hermes": (
        ("hermes", HERMES),
        "I look it up.",
        [
            ("weather", {"city": 'São "Paulo" {', "days": [3, {"a": 1}]}),
            ("f", {"x": "</tool_call>"}),
        ],
    ),
    "hermes, as in Python with apostrophes": (
        (
            "hermes",
            "<tool_call>{'name': 'weather', 'arguments': {'city': 'what's \"up\" in James' town?'"
            " , 'days': ['it's\n' ], 'a's': ''}}</tool_call>",
        ),
        "",
        [("weather", {"city": "what's \"up\" in James' town?", "days": ["it's\n"], "a's": ""})],
    ),
    "hermes, with comments between keys": (
        (
            "hermes",
            '<tool_call>{"name": "weather", // "it"\n "arguments": {"city": "a"}, # b\n "id": 1}',
        ),
        "",
        [("weather", {"city": "a"})],
    ),
    "hermes, a call as Qwen3-Coder writes it": (
        ("hermes", XML),
        "Now:done",
        [("weather", {"city": "12", "days": 12})],
    ),
    "xml, calls in JSON": (
        ("qwen3_coder", HERMES),
        "I look it up.",
        [
            ("weather", {"city": 'São "Paulo" {', "days": [3, {"a": 1}]}),
            ("f", {"x": "</tool_call>"}),
        ],
    ),
    "xml": (("qwen3_coder", XML), "Now:done", [("weather", {"city": "12", "days": 12})]),
    "xml, with Seed-OSS' marks": (
        ("seed_oss", XML.replace("tool_call", "seed:tool_call")),
        "Now:done",
        [("weather", {"city": "12", "days": 12})],
    ),
    "llama": (("llama3_json", LLAMA), "", ROME),
    "llama, tagged": (("llama3_json", "<|python_tag|>" + LLAMA), "", ROME),
    "mistral": (("mistral", MISTRAL), "", ROME),
    "pythonic": (("pythonic", PYTHONIC), "", ROME),
    "glm 4.5": (("glm45", f"I look.\n{GLM45}"), "I look.", ROME),
    "glm 4.5, without lines, and in JSON": (
        (
            "glm45",
            "<tool_call>f<arg_key>maybe</arg_key><arg_value>1 > 0 </arg_key></arg_value>"
            "<arg_key>sure</arg_key><arg_value>true</arg_value>"
            "<arg_key>sure</arg_key><arg_value>false</arg_value></tool_call>"
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
        "",
        [("f", {"maybe": "1 > 0 </arg_key>", "sure": True}), ("f", {})],
    ),
    "glm 4.5, no call": (("glm45", "The mark <tool_call>, <b>."), "The mark <tool_call>, <b>.", []),
    "minimax": (("minimax_m2", f"{MINIMAX}\nDone."), "Done.", ROME),
    "minicpm 5": (("minicpm5", f"Now:\n{MINICPM5}\nDone."), "Now:Done.", ROME),
    "minicpm 5, text in CDATA sections": (
        (
            "minicpm5",
            '<function name="weather"><param name="city"><![CDATA[<b></param>\n]]></param>\n'
            '<param name="days"> 3 </param></function>',
        ),
        "",
        [("weather", {"city": "<b></param>\n", "days": 3})],
    ),
    "minicpm 5, a function of a text": (
        ("minicpm5", 'Write <function name=f> or <function name="a b">.'),
        'Write <function name=f> or <function name="a b">.',
        [],
    ),
    "minimax, values with marks": (
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="weather"><parameter name="city"><b>\n</parameter>'
            '<parameter name="days">[1, 2]</parameter></invoke></minimax:tool_call>',
        ),
        "",
        [("weather", {"city": "<b>\n", "days": [1, 2]})],
    ),
    "gemma 4": (
        (
            "gemma4",
            'I look.<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
            "<|tool_call>call:f{}<tool_call|>",
        ),
        "I look.",
        ROME,
    ),
    "gemma 4, all kinds of values": (
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>a "{<|\n\\<<|"|>,days:[1,{a:<|"|>x<|"|>,b:[]},],'
            '<|"|>key<|"|>:"J\\"" , sure:true,f:-1.5e3,n:null,e:{},w:free text,z:}'
            "<tool_call|>Then.",
        ),
        "Then.",
        [
            (
                "weather",
                {
                    **{"city": 'a "{<|\n\\<', "days": [1, {"a": "x", "b": []}], "key": 'J"'},
                    **{"sure": True, "f": -1500.0, "n": None, "e": {}, "w": "free text", "z": None},
                },
            )
        ],
    ),
    "gemma 4, a bracket too many": (
        ("gemma4", "<|tool_call>call:f{x:1}}<tool_call|>Then."),
        "Then.",
        [("f", {"x": 1})],
    ),
    "gemma 4, no call": (
        ("gemma4", "The mark <|tool_call> cal{l}."),
        "The mark <|tool_call> cal{l}.",
        [],
    ),
    "hunyuan": (
        ("hunyuan_a13b", MISTRAL.replace("[TOOL_CALLS]", "<tool_calls>") + "</tool_calls>"),
        "",
        ROME,
    ),
    "lfm2": (("lfm2", f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>Then."), "Then.", ROME),
    "olmo 3": (
        ("olmo3", 'Yes.<function_calls>\nweather(city="Rome")\nf()\n</function_calls>'),
        "Yes.",
        ROME,
    ),
    "pythonic, behind Llama's mark": (("pythonic", f"<|python_tag|>{PYTHONIC}"), "", ROME),
    "pythonic, between texts": (
        ("pythonic", f"See [1] and [[f], [weather].\n{PYTHONIC}\n\nSo I [look] it up."),
        "See [1] and [[f], [weather].So I [look] it up.",
        ROME,
    ),
    "pythonic, all kinds of values": (
        (
            "pythonic",
            "[weather (city='it\\'s (\"a\", [b)', days = -2, x=[1, (2.5,)], y={'a': None}"
            r', b=true, z="C:\Users", city=1, u=1+1, v=os.system("x"), w="a'
            + '\n"),\nf(maybe=null,)]',
        ),
        "",
        [
            (
                "weather",
                {
                    **{"city": 'it\'s ("a", [b)', "days": -2, "x": [1, [2.5]]},
                    **{"y": {"a": None}, "b": True, "z": r"C:\Users", "u": "1+1"},
                    **{"v": 'os.system("x")', "w": "a\n"},
                },
            ),
            ("f", {"maybe": None}),
        ],
    ),
    "pythonic, quotes that are not escaped": (
        (
            "pythonic",
            "[weather(city='it's James' house, don't', x=['it's', 'b' 'c'], y={'a's' : 'b'})"
            """, f(maybe="say "hi" there", either='a\n'b' )]""",
        ),
        "",
        [
            (
                "weather",
                {
                    **{"city": "it's James' house, don't", "x": ["it's", "bc"]},
                    "y": {"a's": "b"},
                },
            ),
            ("f", {"maybe": 'say "hi" there', "either": "a\n'b"}),
        ],
    ),
    "granite": (("granite", "Ok." + MISTRAL.replace("[TOOL_CALLS]", GRANITE)), "Ok.", ROME),
    "granite, each call between marks": (("granite", GRANITE_CALLS), "", ROME),
    "granite 3.1": (
        ("granite", MISTRAL.replace("[TOOL_CALLS]", "<tool_call>")),
        *("", ROME),
    ),
    "phi4_mini_json, with the tokenizer's marks": (
        ("phi4_mini_json", MISTRAL.replace("[TOOL_CALLS]", GRANITE) + "<|/tool_call|>"),
        *("", ROME),
    ),
    "nemotron": (
        ("llama_nemotron_json", MISTRAL.replace("[TOOL_CALLS]", "Ok. <TOOLCALL>") + "</TOOLCALL>."),
        *("Ok..", ROME),
    ),
    "lists without calls": (
        ("llama_nemotron_json", "Hi. <TOOLCALL>[ ]</TOOLCALL>\n<TOOLCALL>[]</TOOLCALL> You"),
        *("Hi.You", []),
    ),
    "lists that do not end": (("mistral", "[TOOL_CALLS][ "), "[TOOL_CALLS][ ", []),
    "phi4_mini_json": (
        ("phi4_mini_json", MISTRAL.replace("[TOOL_CALLS]", "functools")),
        *("", ROME),
    ),
    "mistral, new": (
        ("mistral", MISTRAL_NEW),
        "Ok.",
        [("weather", {"city": "Rome"}), ("f", {"a": "}"})],
    ),
    "deepseek": (("deepseek_v3", DEEPSEEK), "", ROME),
    "deepseek 3.1": (("deepseek_v31", DEEPSEEK_31), "", ROME),
    "deepseek 3.1, as of 3": (("deepseek_v31", DEEPSEEK), "", ROME),
    "deepseek, as of 3.1": (("deepseek_v3", DEEPSEEK_31), "", ROME),
    "deepseek, with spaces and without arguments": (
        (
            "deepseek_v31",
            DEEPSEEK_31.replace("weather", " weather\n ").replace("{}", "\n"),
        ),
        *("", ROME),
    ),
    "deepseek, a tool called function": (
        ("deepseek_v31", DEEPSEEK_31.replace("weather", "function")),
        *("", [("function", {"city": "Rome"}), ("f", {})]),
    ),
    "mistral, with an id": (
        ("mistral_args", MISTRAL_NEW.replace("[ARGS]", "[CALL_ID]abcDEF123[ARGS]")),
        "Ok.",
        [("weather", {"city": "Rome"}), ("f", {"a": "}"})],
    ),
    "glm": (("glm4_0414", GLM), "", ROME),
    "glm, behind text": (
        (
            "glm4_0414",
            "It is.\nfog\n" + GLM.replace("r\n", "r \n ").replace("<|assis", "\n<|assis"),
        ),
        *("It is.\nfog", ROME),
    ),
    "glm, behind a text of its own": (
        ("glm4_0414", f"\nI look.\n<|assistant|>{GLM}"),
        *("\nI look.\n", ROME),
    ),
    "names of tools alone": (
        ("glm4_0414", "weather\nis a tool, and\nf\n\nweather: {"),
        *("weather\nis a tool, and\nf\n\nweather: {", []),
    ),
    "no tool of the request": (("glm4_0414", 'g\n{"a": 1}'), 'g\n{"a": 1}', []),
    "no call": (("hermes", " <tool_cal {x} \n"), " <tool_cal {x} \n", []),
    "no object": (("hermes", "<tool_call>hm</tool_call>"), "<tool_call>hm</tool_call>", []),
    "no name": (("llama3_json", '{"a": 1} and so on'), '{"a": 1} and so on', []),
    "JSON for the user": (("llama3_json", ' {"name": 3}'), ' {"name": 3}', []),
    "null for arguments": (("hermes", f"{CALL}null}}"), "", [("f", {})]),
    "JSON in a string": (("hermes", f"{CALL}{json.dumps(json.dumps(DEEP))}}}"), "", [("f", DEEP)]),
    "a call without its mark": (("hermes", LLAMA), LLAMA, []),
    "text with a mark": (("hermes", "I write <tool_call> so."), "I write <tool_call> so.", []),
    "no opening mark": (("qwen3_coder", UNMARKED), "Now:", [("f", SOME), ("f", {"x": 1})]),
    "no function": (("qwen3_coder", "a <function=\nb> c"), "a <function=\nb> c", []),
    "a brace too few": (("hermes", f'{CALL}{{"a": 1}} </tool_call>x'), "x", [("f", {"a": 1})]),
    "a brace too many": (("hermes", f"{CALL}{{}}}}}}</tool_call>x"), "x", [("f", {})]),
    "two calls behind one mark": (
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "g"}\n</tool_call>'),
        *("", [("f", {}), ("g", {})]),
    ),
    "an object behind a call": (
        ("hermes", f'{CALL}{{}}}}</tool_call>{{"a": 1}}'),
        *('{"a": 1}', [("f", {})]),
    ),
    "an empty string for arguments": (("hermes", f'{CALL}""}}'), "", [("f", {})]),
    "line ends in strings": (
        ("hermes", f'{CALL}{{"a":\n"b\n\tc"}}}}'),
        *("", [("f", {"a": "b\n\tc"})]),
    ),
    "line ends in strings, 3.1": (
        ("deepseek_v31", DEEPSEEK_31.replace("Rome", "Ro\nme")),
        *("", [("weather", {"city": "Ro\nme"}), ("f", {})]),
    ),
    "arguments by both names": (
        ("hermes", f'{CALL}{{"a": 1}}, "parameters": {{}}}}'),
        *("", [("f", {"a": 1})]),
    ),
    "function for name": (
        ("llama3_json", '{"type": "function", "function": "f", "parameters": {}}'),
        *("", [("f", {})]),
    ),
    "a function as an object": (
        ("llama3_json", '{"function": {"name": "f"}} {"function": {"name": 1}}'),
        *('{"function": {"name": 1}}', [("f", {})]),
    ),
    "a function as an object, with keys around": (
        ("hermes", f'<tool_call>{{"id": 1, "function": {CALL[11:]}{{"a": 1}}}}, "type": "x"}}'),
        *("", [("f", {"a": 1})]),
    ),
    "a function as an object, a brace too few": (
        ("hermes", f'<tool_call>{{"function": {CALL[11:]}{{}}}}</tool_call>x'),
        *("x", [("f", {})]),
    ),
    "a list of objects": (("llama3_json", f" [{LLAMA.replace(';', ',')}]"), "", ROME),
    "a list of objects, between marks": (
        ("hermes", MISTRAL.replace("[TOOL_CALLS]", "<tool_call>") + "</tool_call>, [x]"),
        *(", [x]", ROME),
    ),
    "llama, a function by its name": (
        (
            "llama3_json",
            'I look: <function=weather>{"city": "Rome"}</function>\n<function=f> {}</function>',
        ),
        *("I look:", ROME),
    ),
    "llama, functions that are none": (
        ("llama3_json", 'a <function=g>{"a": 1}</function>, <function=f> b'),
        *('a <function=g>{"a": 1}</function>, <function=f> b', []),
    ),
    "a list for the user": (("llama3_json", '[{"a": 1}, [{'), '[{"a": 1}, [{', []),
    "half of a character as the name": (
        ("hermes", '<tool_call>{"name": "\\ud83d"}'),
        *('<tool_call>{"name": "\\ud83d"}', []),
    ),
    "deepseek without a fence": (
        ("deepseek_v3", DEEPSEEK.replace("```json\n", "").replace("\n```", "")),
        *("", ROME),
    ),
    "deepseek 3.1 with a fence": (
        ("deepseek_v31", DEEPSEEK_31.replace("{", "```json\n{").replace("}", "}\n```")),
        *("", ROME),
    ),
    "the end of a function in a value": (
        ("qwen3_coder", XML.replace("12", "<a></function>\n</a>", 1)),
        *("Now:done", [("weather", {"city": "<a></function>\n</a>", "days": 12})]),
    ),
    "the beginning of a parameter in a value": (
        ("qwen3_coder", XML.replace("12", "a <parameter=b> c", 1)),
        *("Now:done", [("weather", {"city": "a <parameter=b> c", "days": 12})]),
    ),
    "parameters without their ends": (
        ("qwen3_coder", XML.replace("</parameter>\n", "")),
        *("Now:done", [("weather", {"city": "12", "days": 12})]),
    ),
    "a function without its end": (
        ("qwen3_coder", XML.replace("</function>\n", "")),
        *("Now:done", [("weather", {"city": "12", "days": 12})]),
    ),
    "neither end": (
        ("qwen3_coder", XML[: XML.index("</function>")]),
        *("Now:", [("weather", {"city": "12", "days": 12})]),
    ),
    "a parameter twice": (
        ("qwen3_coder", XML.replace("days", "city")),
        *("Now:done", [("weather", {"city": "12"})]),
    ),
    "nothing between two parameters": (
        ("qwen3_coder", XML.replace("12\n</parameter>\n", "", 1)),
        *("Now:done", [("weather", {"city": "", "days": 12})]),
    ),
    "JSON in a function": (
        ("qwen3_coder", '<tool_call><function=f>\n{"a": 1}\n</function></tool_call>'),
        *("", [("f", {"a": 1})]),
    ),
    "a value as Python writes it": (
        ("qwen3_coder", DAYS.format("{'a': [True]}")),
        *("", [("weather", {"days": {"a": [True]}})]),
    ),
    "half of a character as a value": (
        ("qwen3_coder", DAYS.format('["\\ud83d"]')),
        *("", [("weather", {"days": '["\\ud83d"]'})]),
    ),
    "no number": (("qwen3_coder", DAYS.format("NaN")), "", [("weather", {"days": "NaN"})]),
    "a call behind a mark that begins none": (
        ("hermes", f"<tool_call>nothing{CALL}{{}}}}</tool_call>"),
        *("<tool_call>nothing", [("f", {})]),
    ),
    "backslashes of paths and expressions": (
        ("hermes", CALL + r'{"a": "C:\Users\new\d+ \u12 \\"}}'),
        *("", [("f", {"a": "C:\\Users\new\\d+ \\u12 \\"})]),
    ),
    "a backslash in front of a quote, 3.1": (
        ("deepseek_v31", DEEPSEEK_31.replace("Rome", r"\u00e9\"\è")),
        *("", [("weather", {"city": 'é"\\è'}), ("f", {})]),
    ),
    "braces twice": (("hermes", '<tool_call>{{"name": "f"}}</tool_call>'), "", [("f", {})]),
    "a mark twice": (("hermes", f"<tool_call>\n{CALL}{{}}}}</tool_call>"), "", [("f", {})]),
    "a mark twice, XML": (
        ("qwen3_coder", XML.replace("<tool_call>", "<tool_call>\n<tool_call>")),
        *("Now:done", [("weather", {"city": "12", "days": 12})]),
    ),
    "a mark alone": (("hermes", "<tool_call>\n <tool"), "<tool_call>\n <tool", []),
    "a person for the user": (
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        *('{"name": "Bob", "age": 3}', []),
    ),
    "a tool that is none": (
        ("llama3_json", '{"name": "bob", "parameters": {"a": 1}}'),
        *("", [("bob", {"a": 1})]),
    ),
    "a function in a text": (
        ("qwen3_coder", "I write <function=f> and `<function=f>`, <function=f>"),
        *("I write <function=f> and `<function=f>`, <function=f>", []),
    ),
    "the end of a parameter in a value": (
        ("qwen3_coder", XML.replace("12", 'a\n</parameter>\n"b" </parameter>.', 1)),
        *("Now:done", [("weather", {"city": 'a\n</parameter>\n"b" </parameter>.', "days": 12})]),
    ),
    "a line with another parameter in a value": (
        ("qwen3_coder", XML.replace("12", "a\n<parameter=b>\nc", 1)),
        *("Now:done", [("weather", {"city": "a\n<parameter=b>\nc", "days": 12})]),
    ),
    "no end but the parameter's": (
        ("qwen3_coder", XML[: XML.index("</function>")] + "\n"),
        *("Now:", [("weather", {"city": "12", "days": 12})]),
    ),
    "names between quotes": (
        ("qwen3_coder", XML.replace("=weather", '="weather"').replace("=city", "='city'")),
        *("Now:done", [("weather", {"city": "12", "days": 12})]),
    ),
    "mistral, with spaces": (
        ("mistral_args", '[TOOL_CALLS] f [ARGS] {"a": 1}'),
        *("", [("f", {"a": 1})]),
    ),
    "without parameters, cut": (("qwen3_coder", "<tool_call><function=f>"), "", [("f", {})]),
    "cut in the name": (("hermes", '<tool_call>{"name": "we'), '<tool_call>{"name": "we', []),
}


def read(parser, pieces_of_text):
    """What an answer says: its thinking, its text, and its calls as (name, arguments as text)."""
    pieces = [piece for text in pieces_of_text for piece in parser.feed(text)] + parser.finish()
    calls = {piece.index: [piece.name, ""] for piece in pieces if isinstance(piece, CallStart)}
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    assert list(calls) == list(range(len(calls)))
    thinking = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return thinking, content, [tuple(call) for call in calls.values()]


def cuts(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def tools(name):
    return ToolCallParser(FORMATS[name], TYPES)


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_and_text_are_found(case):
    (form, text), content, calls = WRITTEN[case]
    thinking, shown, found = read(tools(form), [text])
    assert (thinking, shown) == ("", content)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("case", WRITTEN)
@given(places=st.lists(st.integers(0, 500), max_size=12))
def test_calls_are_the_same_however_the_text_is_cut(case, places):
    (form, text), *_ = WRITTEN[case]
    assert read(tools(form), cuts(text, places)) == read(tools(form), [text])


@given(
    text=st.text(alphabet="<tool_ca>/{}[]\"\\:,n ame\nparguments'TFN", max_size=120), data=st.data()
)
def test_any_text_is_the_same_however_it_is_cut(text, data):
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    places = data.draw(st.lists(st.integers(0, 200), max_size=8))
    assert read(tools(form), cuts(text, places)) == read(tools(form), [text])


def test_arguments_come_before_the_call_has_ended():
    parser = tools("hermes")
    pieces = parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    assert pieces == [CallStart(0, "weather"), CallArguments(0, '{"city": "Ro')]


def test_text_that_is_no_call_is_shown_as_soon_as_that_is_certain():
    shown = tools("qwen3_coder").feed("<tool_call>a > b")
    assert "".join(piece.text for piece in shown) == "<tool_call>a > b"


def test_text_of_a_parameter_comes_before_the_parameter_has_ended():
    """Files are written so, and clients show them meanwhile."""
    parser = tools("qwen3_coder")
    begin = '<tool_call><function=weather><parameter=city>\nRo"\n'
    assert parser.feed(begin) == [CallStart(0, "weather"), CallArguments(0, '{"city": "Ro\\"')]
    assert parser.feed("</b>\n</param") == [CallArguments(0, "\\n</b>")]
    assert parser.feed("eter>\n<parameter=days>1") == [CallArguments(0, '"')]
    assert parser.feed("2</parameter></function>") == [CallArguments(0, ', "days": 12}')]


def test_behind_a_list_in_python_only_a_list_is_one():
    """What is enforced of strict tools begins with a bracket."""
    found = read(tools("pythonic"), [PYTHONIC + "\n[f()] f(maybe=1), [f()]"])
    assert found == ("", "f(maybe=1),", [("weather", '{"city": "Rome"}'), *[("f", "{}")] * 3])


def test_arguments_in_python_come_when_each_has_ended():
    parser = tools("pythonic")
    assert parser.feed("[weather(city='Ro") == []
    assert parser.feed("me' ") == []
    assert parser.feed(", ") == [CallStart(0, "weather"), CallArguments(0, '{"city": "Rome"')]
    assert parser.feed("days=2)") == [CallArguments(0, ', "days": 2}')]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[none(a=1)]", []),
        ("[weather]", []),
        ('[weather("Rome")]', []),
        ("[weather(city", []),
        ("weather(city='Rome')", []),
        ("[[1, 2], [3]]", []),
        ("[f(either=1, 2)]", [("f", '{"either": 1')]),
        ("[f(either=1", []),
        ("[f(either=" + "-" * 60_000 + "1)]", [("f", json.dumps({"either": "-" * 60_000 + "1"}))]),
        ("[f(either=" + "(" * 9000 + ")" * 9000 + ")]", [("f", ...)]),
    ],
)
def test_what_is_no_call_in_python_is_text_or_has_no_whole_arguments(text, calls):
    _, content, found = read(tools("pythonic"), [text])
    assert content == ("" if found else text)
    assert [name for name, _ in found] == [name for name, _ in calls]
    assert all(known in (..., said) for (_, known), (_, said) in zip(calls, found, strict=True))


def test_arguments_that_are_cut_are_no_whole_object():
    """A client must not take what `max_tokens` has cut for what the model wanted."""
    days = DAYS.format(12)[:-25]
    assert read(tools("qwen3_coder"), [days])[2] == [("weather", '{"days": ')]
    for cut in ('{"a": Tru', '{"a": "True,", "b": 1, '):
        assert read(tools("hermes"), [CALL + cut])[2] == [("f", cut)]
    cut = XML[: XML.rindex("12") + 1]
    for form, text in (("qwen3_coder", cut), ("hermes", HERMES[:80])):
        [(_, arguments)] = read(tools(form), [text])[2]
        assert arguments.startswith('{"city": ')
        with pytest.raises(ValueError, match="line 1"):
            json.loads(arguments)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (" \n", {}),
        (" null", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        *(
            (text, {"raw": text})
            for text in ("[1]", "{", '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud800"}')
        ),
    ],
)
def test_arguments_are_an_object_whatever_the_model_writes(written, read):
    """In a history and in an answer of /v1/messages alike."""
    assert arguments_object(written) == read


def test_arguments_that_are_nested_too_deeply_are_shown_raw():
    text = '{"a": ' + "[" * 10**5
    assert arguments_object(text) == {"raw": text}


@pytest.mark.parametrize("text", ["[" * 100_000, "{'a':" * 9000, "1" * 5000, "1e999", "(" * 9000])
def test_values_that_cannot_be_read_are_text(text):
    kinds = frozenset(("array",))
    assert typed(text, kinds) == text


def test_words_of_python_are_constants_where_these_are_wanted():
    either = frozenset(("integer", "boolean", "null"))
    assert [typed(word, either) for word in ("None", "True\n", "false")] == [None, True, False]
    assert typed("None", frozenset(("integer",))) == "None"
    assert typed("None", frozenset(("string", "null"))) == "None"


@pytest.mark.parametrize("mark", ['"', ""])
def test_a_long_value_of_gemma_4_is_read(mark):
    """In a time that grows with its length: otherwise it takes minutes."""
    text = "word " * 50_000 + "."
    written = f"<|tool_call>call:f{{a:{mark}{text}{mark}}}<tool_call|>"
    [(name, arguments)] = read(tools("gemma4"), list(written))[2]
    assert (name, json.loads(arguments)) == ("f", {"a": text})


def test_a_long_value_is_read():
    text = XML.replace("12", "<a>\n" * 50_000, 1)
    assert len(read(tools("qwen3_coder"), [text])[2][0][1]) > 200_000


OPENED = ThinkingMarks(opened=True)
THOUGHT = "<think>\nSo, <b>\n\nhm.\n</think>\n\nParis </think> it is.\n"


@given(places=st.lists(st.integers(0, 100), max_size=12))
def test_thinking_is_told_apart_however_the_text_is_cut(places):
    expected = ("So, <b>\n\nhm.", "Paris </think> it is.\n", [])
    assert read(ReasoningParser(), cuts(THOUGHT, places)) == expected
    opened = THOUGHT.removeprefix("<think>")
    assert read(ReasoningParser(OPENED), cuts(opened, places)) == expected


WRAPPED = "<think>So</think>\n<response>\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (WRAPPED + "It is.\n</response>\n", "It is."),
        (WRAPPED + "A <b> </response>\n\n</response> ", "A <b> </response>"),
        (WRAPPED + "A </response> b </resp", "A </response> b </resp"),
        (WRAPPED + "</response>", ""),
        (WRAPPED, ""),
        ("<think>So</think>\n<respond> </response>", "<respond> </response>"),
        ("<response>It is.</response>", "<response>It is.</response>"),
    ],
)
@given(places=st.lists(st.integers(0, 100), max_size=12))
def test_marks_around_an_answer_after_thinking_are_not_shown(text, shown, places):
    """Granite 3.3 writes them."""
    template = "{{ tools }} <think></think> ... <response></response>"
    thought = "So" if text.startswith("<think>") else ""
    parser = ReasoningParser(thinking_of(template))
    assert read(parser, cuts(text, places)) == (thought, shown, [])


@given(places=st.lists(st.integers(0, 100), max_size=12))
def test_thinking_behind_words_is_told_apart(places):
    """Granite 3.2 has no other marks."""
    marks = thinking_of("after 'Here is my thought process:' and 'Here is my response:'")
    text = "Here is my thought process:\n\nSo: Here is.\n\nHere is my response:\n\nIt is."
    assert read(ReasoningParser(marks), cuts(text, places)) == ("So: Here is.", "It is.", [])
    assert read(ReasoningParser(marks), cuts(text[4:], places)) == ("", text[4:], [])


@pytest.mark.parametrize("begin", ["<think>", "\n <think>\n", "<think>\n\n"])
@given(places=st.lists(st.integers(0, 100), max_size=12))
def test_a_mark_that_opens_thinking_again_is_none_of_it(begin, places):
    text = begin + "Hm <think> so.</think>Yes"
    parser = ReasoningParser(OPENED)
    assert read(parser, cuts(text, places)) == ("Hm <think> so.", "Yes", [])
    assert read(ReasoningParser(OPENED), ["<thi"]) == ("<thi", "", [])


@pytest.mark.parametrize(
    ("continued", "read"),
    [
        (None, ("So</think>No", "")),
        ("<think>\nWell", ("No", "So")),
        ("<think>\nWell</think>And", ("So</think>No", "")),
        ("Well", ("So</think>No", "")),
    ],
)
def test_an_answer_goes_on_with_the_thinking_that_it_is_given(continued, read):
    asked = FormatOptions(tools=[Tool("f", None)])
    form = ModelFormats("{{ tools }}<tool_call></think>", shows_tools=True).of(
        asked, "a" + (continued or ""), continued
    )
    reader = form.reader()
    reader.read("So</think>No", ended=True)
    assert (reader.content, reader.thinking) == read
    assert form.thinking == (OPENED if read[1] else ThinkingMarks() if continued is None else None)


HM, LOOK = "Hm.", "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>"
DRAFT = f"So {LOOK}\n</tool_call>\nThat is it."


@pytest.mark.parametrize(
    ("text", "thinking", "content", "calls"),
    [
        (f"{HM}\n\n{LOOK}\n</tool_call>", HM, "", 1),
        (f"{HM}\n\n{LOOK}\n</tool_call>\n{LOOK}\n</tool_call>\n", HM, "", 2),
        (f"{HM}\n{LOOK}\n</tool_call>\n</think>\n\n", HM, "", 1),
        (f"{DRAFT} {LOOK}", DRAFT, "", 1),
        (f"{HM}\n{DRAFT}\n", f"{HM}\n{DRAFT}", "", 0),
        (f"{DRAFT}</think>{LOOK}</tool_call>", DRAFT, "", 1),
        (f"{HM} {LOOK}</think>Yes.", f"{HM} {LOOK}", "Yes.", 0),
        (f"{HM} {LOOK[:-20]}", f"{HM} {LOOK[:-20]}", "", 0),
        (
            f"{HM} {LOOK.replace('weather', 'none')}",
            f"{HM} {LOOK.replace('weather', 'none')}",
            "",
            0,
        ),
        ("I write <tool_call> and <tool", "I write <tool_call> and <tool", "", 0),
    ],
)
@given(places=st.lists(st.integers(0, 300), max_size=12))
def test_a_call_with_which_the_thinking_ends_is_a_call(text, thinking, content, calls, places):
    """And a draft, which has something behind it, or is cut, is thinking."""
    tools = [Tool("weather", {"type": "object", "properties": {"days": {"type": "integer"}}})]
    reader = (
        ModelFormats("{{ tools }}<tool_call><function=</think>", shows_tools=True)
        .of(FormatOptions(tools), "<think>\n")
        .reader()
    )
    parts = cuts(text, places)
    for i, part in enumerate(parts):
        reader.read(part, ended=i == len(parts) - 1)
    assert (reader.thinking.rstrip(), reader.content) == (thinking, content)
    assert [(call.name, call.arguments) for call in reader.calls] == [
        ("weather", '{"days": 2}')
    ] * calls


class CountingCall(JsonCall):
    """A call in JSON that counts the characters that all of them are fed."""

    fed = 0

    def feed(self, char):
        CountingCall.fed += 1
        super().feed(char)


COUNTED = CallFormat(
    lambda _: CountingCall(), ("<tool_call>",), ("</tool_call>",), separators="} \n", again="{"
)
NESTED = '<tool_call>{"a":' * 500 + "}" * 500 + "no"
DRAFTS = '<tool_call>{"name": "f", "arguments": {"a":' * 500 + "}" * 1000 + "no"


@pytest.mark.parametrize("step", [1, 7, len(DRAFTS)])
@pytest.mark.parametrize(("text", "thinks"), [(NESTED, False), (NESTED, True), (DRAFTS, True)])
def test_marks_within_each_other_are_not_read_again_and_again(text, thinks, step):
    """They would take seconds of the server's loop, while all streams stand still."""
    find = partial(ToolCallParser, COUNTED)
    parser = CallsInThinking(find, {"f"}) if thinks else find()
    CountingCall.fed = 0
    thinking, content, calls = read(parser, slices(text + "<tool", step))
    assert (thinking + content, calls) == (text + "<tool", [])
    assert CountingCall.fed < 20 * len(text)


def slices(text, step):
    return [text[at : at + step] for at in range(0, len(text), step)]


@pytest.mark.parametrize("mark", ["<tool_call>", "<tool_call>{"])
def test_a_call_behind_a_long_text_that_is_none_is_found(mark):
    text = mark + '"name' + " " * 400 + '": 1}'
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert read(tools("hermes"), [text, call]) == ("", text, [("weather", "{}")])


CALLED, WEATHER = [("weather", "{}")], '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
LONG = "I call it. " * 40
SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("form", "begin", "call"),
    [
        ("hermes", "<tool_call>{ ", WEATHER),
        ("hermes", "<tool_call>{" + " " * 500, WEATHER),
        ("hermes", "<tool_call>", "<tool_call>" + WEATHER),
        ("qwen3_coder", "<tool_call>", "<tool_call><function=weather></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=", "<tool_call><function=weather></function>"),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]{}"),
        ("deepseek_v3", SEP[0], f"{SEP[0]}function{SEP[1]}weather\n```json\n{{}}\n```"),
        ("deepseek_v31", SEP[0], f"{SEP[0]}weather{SEP[1]}{{}}"),
    ],
)
def test_a_call_behind_a_mark_in_a_long_text_is_found(form, begin, call):
    text = f"{begin} {LONG}"
    assert read(tools(form), [text + call]) == ("", text.rstrip(), CALLED)
    parser = tools(form)
    shown = "".join(piece.text for piece in parser.feed(text))
    assert shown == text.rstrip()


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_call_that_a_draft_has_taken_for_its_own_text_is_found(step):
    """What follows the draft's open string is not as JSON goes on: it is thinking."""
    draft = f'<tool_call>{{"name": "weather", "arguments": {{"city": "{LONG}'
    parser = CallsInThinking(partial(tools, "hermes"), TYPES)
    assert read(parser, slices(draft + "\n" + WEATHER, step)) == (draft.rstrip(), "", CALLED)


@pytest.mark.parametrize("behind", ["…", "a}", "[1,]", '"x" and so on', "{1: 2}", "01", "}", "[}"])
def test_a_draft_is_thinking_as_soon_as_it_can_be_no_call(behind):
    draft = f'<tool_call>{{"name": "weather", "arguments": {{"city": {behind} Hm'
    parser = CallsInThinking(partial(tools, "hermes"), TYPES)
    assert parser.feed(draft) == [Reasoning(draft)]
    assert not parser.holds


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_draft_that_nothing_tells_from_a_call_is_kept_back_so_far(step, monkeypatch):
    monkeypatch.setattr(unclosed, "MAX_HELD", 1000)
    draft = LOOK[:-30].ljust(1000, "a")
    parser = CallsInThinking(partial(tools, "qwen3_coder"), TYPES)
    assert [piece for part in slices(draft, step) for piece in parser.feed(part)] == []
    assert parser.feed("a") == [Reasoning(draft + "a")]
    assert read(parser, [LOOK]) == ("", "", [("weather", '{"days": 2}')])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda within: st.lists(within, max_size=3) | st.dictionaries(st.text(max_size=3), within),
    max_leaves=5,
)


@settings(max_examples=50)
@given(value=st.dictionaries(st.text(max_size=3), JSON, max_size=3), ascii=st.booleans())
def test_each_beginning_of_an_object_may_become_one(value, ascii):
    text = json.dumps(value, ensure_ascii=ascii, indent=1)
    assert ObjectPrefix().feed(f" {text}\n")
    assert not ObjectPrefix().feed(text + ",")
    assert not ObjectPrefix().feed(f"[{text}")


@given(text=st.text(alphabet='{}[]",: 1.-eatrufls', max_size=20))
def test_what_may_become_an_object_is_one_when_its_brackets_are_closed(text):
    """Or lacks a value, a key or the end of a word in front of them."""
    prefix = ObjectPrefix()
    if prefix.feed("{" + text) and not prefix._open:
        assert isinstance(json.loads("{" + text), dict)


def test_white_space_in_a_call_is_not_kept_to_be_read_again():
    call = XmlCall({})
    for char in f"{' ' * 9}\n" * 1000 + "<function=f>" + " " * 10000:
        call.feed(char)
    assert len(call._pieces) <= 1


@pytest.mark.parametrize("mark", ["[TOOL_CALLS]f", "<｜tool▁call▁begin｜>f"])
def test_a_long_text_in_front_of_arguments_is_shown_at_once(mark):
    """It is no name; a pattern for one would be tried in more steps than it has characters."""
    parser = tools("mistral" if "TOOL" in mark else "deepseek_v31")
    text = mark + "f " * 200
    assert "".join(piece.text for piece in parser.feed(text)) == text.rstrip()


def test_arguments_in_thinking_come_as_one_piece():
    parser = CallsInThinking(partial(tools, "hermes"), TYPES)
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert [piece for char in text for piece in parser.feed(char)] == []
    assert parser.finish() == [CallStart(0, "weather"), CallArguments(0, '{"city": "Rome"}')]


def test_marks_of_thinking_that_are_special_tokens_are_shown_to_the_reader():
    """Magistral's are, and text without special tokens would lack them."""
    for hidden in (True, False):
        form = ModelFormats("[/THINK]", shows_tools=False, hides=lambda _, h=hidden: h).of(
            FormatOptions(), "a"
        )
        assert (form.thinking, form.shows_special) == (KNOWN_MARKS[1], hidden)
    reader = form.reader()
    reader.read("[THINK]Hm[/THINK]Yes", ended=True)
    assert (reader.thinking, reader.content) == ("Hm", "Yes")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_gemma_4_thinks_in_a_channel(step):
    """As its prompt format says; both marks are special tokens."""
    template = "{{ '<|channel>thought\n' + message['reasoning'] + '\n<channel|>' }}"
    form = ModelFormats(template, shows_tools=False, hides=lambda _: True).of(FormatOptions(), "a")
    assert form.shows_special
    for said, thought in (("<|channel>thought\nHm.\n<channel|>Yes", "Hm."), ("Yes", "")):
        reader = form.reader()
        for first in range(0, len(said), step):
            reader.read(said[first : first + step], ended=False)
        reader.read("", ended=True)
        assert (reader.thinking, reader.content) == (thought, "Yes")
    assert not ends_in_thinking(KNOWN_MARKS[4], "<|turn>model\n<|channel>thought\n<channel|>")


def test_hunyuan_answers_between_marks():
    template = "<think></think>{{ content.split('<answer>')[-1] }}</answer>"
    form = ModelFormats(template, shows_tools=False).of(FormatOptions(), "a")
    reader = form.reader()
    reader.read("<think>\nHm\n</think>\n<answer>\nYes\n</answer>", ended=True)
    assert (reader.thinking, reader.content) == ("Hm", "Yes")


def test_seed_oss_thinks_between_marks_of_its_own():
    form = ModelFormats("<seed:think></seed:think>", shows_tools=False).of(FormatOptions(), "a")
    reader = form.reader()
    reader.read("<seed:think>Hm</seed:think>Yes", ended=True)
    assert (reader.thinking, reader.content) == ("Hm", "Yes")


def test_text_without_thinking_is_as_it_is():
    assert read(ReasoningParser(), [" Paris"]) == ("", " Paris", [])
    assert read(ReasoningParser(OPENED), ["not yet"]) == ("not yet", "", [])
    assert read(ReasoningParser(), ["  <thi"]) == ("", "  <thi", [])


def test_every_format_can_be_named():
    assert get_args(ToolForm) == ("harmony", "muse_glimmer", *FORMATS)


def test_the_format_is_chosen_from_the_template():
    assert format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert format_of("{% if tools %}<tool_call><function=x>{% endif %}") == "qwen3_coder"
    seed = "{% if tools %}<seed:tool_call><function=x></seed:tool_call>{% endif %}"
    assert format_of(seed) == "seed_oss"
    assert format_of("{% if tools %}<|tool_call|>{% endif %}") == "granite"
    assert format_of("{% if tools %}functools[{% endif %}") == "phi4_mini_json"
    assert format_of("{{ tools }}<TOOLCALL>[") == "llama_nemotron_json"
    assert format_of("{{ tools }}[func_name1(params_name1=params_value1...)]") == "pythonic"
    assert format_of("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}") == "mistral_args"
    assert format_of("{% if tools %}[TOOL_CALLS][{% endif %}") == "mistral"
    assert format_of("{{ tools }}<|observation|>{{ m.metadata }}") == "glm4_0414"
    marks = {
        "<tool_call>{{ name }}<arg_key>": "glm45",
        "<minimax:tool_call>": "minimax_m2",
        '<param name="': "minicpm5",
        "<tool_calls>": "hunyuan_a13b",
        "<|tool_call>call:{{ name }}": "gemma4",
        "<|tool_list_start|>": "lfm2",
        "<function_calls>": "olmo3",
    }
    assert {mark: format_of(f"{{{{ tools }}}}{mark}") for mark in marks} == marks
    assert format_of("{{ messages }}<tool_call>") is None
    assert format_of(None) is None
