"""Incremental parser of tool calls in an answer's text, driven by a table of formats."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from types import MappingProxyType

from twolane.frontend.parsers.gemma_call import GemmaCall
from twolane.frontend.parsers.json_call import WHITE, CallReader
from twolane.frontend.parsers.marked_call import glm45_call, minicpm5_call, minimax_call
from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    held_back,
    read_again_from,
)
from twolane.frontend.parsers.pythonic import PythonicCall
from twolane.frontend.parsers.readers import (
    NamedLine,
    Types,
    deepseek_call,
    listed_call,
    listed_object,
    tagged_call,
)


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls."""

    reader: Callable[[Types], CallReader]
    """Makes the parser of one call after its mark."""
    begin: tuple[str, ...]
    """Marks that begin a call or a list of calls."""
    end: tuple[str, ...] = ()
    """Marks after a call, which are not shown."""
    separators: str = WHITE
    """Characters after a call, up to an end mark, that are not shown."""
    again: str = ""
    """First characters of another call after one, without a mark."""
    closes: bool = False
    """Whether a call after the end mark needs a mark of its own."""
    bare: bool = False
    """Whether an answer that begins with `again`, or like a call, begins with a call."""
    within: tuple[str, ...] = ()
    """Beginnings of a call whose opening mark the model leaves out."""


def in_list(begin: tuple[str, ...], end: tuple[str, ...] = ()) -> CallFormat:
    """Return the format of calls in a list of objects between these marks."""
    return CallFormat(listed_call, begin, end, separators=",]} \t\r\n", again="{")


DEEPSEEK = CallFormat(
    deepseek_call,
    ("<｜tool▁call▁begin｜>",),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""DeepSeek's format: fine-tuned models mix the forms of V3 and V3.1."""
FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(
            tagged_call, ("<tool_call>",), ("</tool_call>",), separators=",]} \t\r\n", again="{"
        ),
        "qwen3_coder": CallFormat(
            tagged_call, ("<tool_call>",), ("</tool_call>",), within=("<function=",)
        ),
        "seed_oss": CallFormat(
            tagged_call, ("<seed:tool_call>",), ("</seed:tool_call>",), within=("<function=",)
        ),
        "llama3_json": CallFormat(
            listed_object,
            ("<|python_tag|>", "<function="),  # the second with tools that only a user tells of
            ("</function>",),
            separators=",;]} \t\r\n",
            again="{[",
            bare=True,
        ),
        "mistral": in_list(("[TOOL_CALLS]",)),
        "mistral_args": in_list(("[TOOL_CALLS]",)),
        "granite": in_list(
            ("<|tool_call|>", "<tool_call>"),  # models of 3.1 write the second
            ("<|/tool_call|>", "</tool_call>"),
        ),
        "phi4_mini_json": in_list(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
        "llama_nemotron_json": in_list(("<TOOLCALL>",), ("</TOOLCALL>",)),
        "deepseek_v3": DEEPSEEK,
        "deepseek_v31": DEEPSEEK,
        "glm4_0414": CallFormat(
            NamedLine, ("\n", "<|assistant|>"), ("<|assistant|>", "<|observation|>"), bare=True
        ),
        "glm45": CallFormat(glm45_call, ("<tool_call>",), ("</tool_call>",)),
        "minimax_m2": CallFormat(
            minimax_call, ("<minimax:tool_call>",), ("</minimax:tool_call>",), again="<"
        ),
        "minicpm5": CallFormat(minicpm5_call, ('<function name="',)),
        "hunyuan_a13b": in_list(("<tool_calls>",), ("</tool_calls>",)),
        "gemma4": CallFormat(
            GemmaCall, ("<|tool_call>",), ("<tool_call|>",), separators="} \t\r\n"
        ),
        "lfm2": CallFormat(
            PythonicCall,
            ("<|tool_call_start|>[",),
            ("]", "<|tool_call_end|>"),
            separators=", \t\r\n",
            again=ascii_letters + "_",
        ),
        "olmo3": CallFormat(
            PythonicCall, ("<function_calls>",), ("</function_calls>",), again=ascii_letters + "_"
        ),
        "pythonic": CallFormat(
            PythonicCall,
            ("[", "<|python_tag|>["),
            ("]",),
            separators=", \t\r\n",
            again=ascii_letters + "_",
            closes=True,
        ),
    }
)
"""Formats by their names in vLLM's `--tool-call-parser`; it has none for the calls of Mistral's
newer models, which are in none of its lists, and of GLM-4-0414."""
LISTS = ("<｜tool▁calls▁begin｜>",)
"""Marks before the first call of a list, which are not shown."""


def format_of(template: str | None) -> str | None:
    """Return the name of the format in a chat template; None: it has none."""
    marks = (
        ("<|channel|>commentary", "harmony"),
        ("<atem:function_calls>", "muse_glimmer"),
        ("<seed:tool_call>", "seed_oss"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<param name=", "minicpm5"),
        ("<arg_key>", "glm45"),
        ("<tool_calls>", "hunyuan_a13b"),
        ("<|tool_call>call:", "gemma4"),
        ("<|tool_call_start|>", "lfm2"),
        ("<|tool_list_start|>", "lfm2"),
        ("List of tools: [", "lfm2"),
        ("<function_calls>", "olmo3"),
        ("<function=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("[ARGS]", "mistral_args"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "granite"),
        ("functools[", "phi4_mini_json"),
        ("<TOOLCALL>", "llama_nemotron_json"),
        ("```json", "deepseek_v3"),
        ("<｜tool▁sep｜>", "deepseek_v31"),
        ("<|observation|>", "glm4_0414"),
        ("['metadata']", "glm4_0414"),
        ("[func_name1(", "pythonic"),
        ('"parameters": dictionary of argument name', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
    )
    if template is None or "tools" not in template:
        return None
    return next((name for mark, name in marks if mark in template), None)


class ToolCallParser:
    """Splits an answer's text into tool calls and the text around them (`pieces.Parser`).

    White space between text and calls is dropped. What begins like a call and is none is text.

    Args:
        call_format: the format of the model's calls.
        types: the types of the tools' parameters.
    """

    def __init__(self, call_format: CallFormat, types: Types = MappingProxyType({})) -> None:
        self._format = call_format
        self._types = types
        self.marks = (*call_format.begin, *call_format.within, *LISTS)
        """Marks that begin calls or lists of calls."""
        self._text = ""
        """Text that is not parsed yet."""
        self._reader: CallReader | None = None
        self._raw: list[str] = []
        """Text of the current call."""
        self._state = "first"
        self._calls = 0
        """Number of calls with a known name."""
        self._named = False
        self._marked = False
        """Whether an end mark followed the last call."""

    @property
    def count(self) -> int:
        """Number of calls so far."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """See `Parser.feed`."""
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "first": self._first,
            "text": self._plain,
            "opened": self._opened,
            "call": self._call,
            "after": self._after,
        }
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        rest, self._text = self._text, ""
        if self._reader is not None and self._state in ("opened", "call"):
            pieces: list[Piece] = []
            if self._reader.name is not None or self._raw[0].strip():
                self._reader.end()
            if self._reader.name is not None:
                self._pass_on(self._reader, pieces)
                return pieces
            rest = "".join(self._raw) + rest
        elif self._state == "after" or (self._calls and not rest.strip()):
            rest = ""
        return [Content(rest)] if rest else []

    def _first(self, pieces: list[Piece]) -> bool:
        """Parse the beginning of the answer or of the text after a call."""
        begun = self._text.lstrip()
        if not begun:
            return False
        if self._format.bare and (not self._format.again or begun[0] in self._format.again):
            self._open()
        else:
            self._text = begun if self._calls else self._text
            self._state = "text"
        return True

    def _plain(self, pieces: list[Piece]) -> bool:
        places = [(self._text.find(mark), mark) for mark in self.marks if mark in self._text]
        if places:
            place, mark = min(places)
            shown = self._text[:place].rstrip()
            space = self._text[len(shown) : place]
            self._show(shown, pieces)
            self._text = self._text[place:].removeprefix(
                "" if mark in self._format.within else mark
            )
            if mark in self._format.begin:
                self._open(space + mark)
            elif mark in self._format.within:
                self._open(space)
            return True
        kept = held_back(self._text, self.marks)
        certain = self._text[: len(self._text) - kept].rstrip()
        self._show(certain, pieces)
        self._text = self._text[len(certain) :]
        return False

    def _open(self, before: str = "") -> None:
        """Begin to parse a call; `before` is shown if it turns out to be none."""
        self._reader, self._raw, self._named = self._format.reader(self._types), [before], False
        self._state = "opened" if before.strip() else "call"

    def _opened(self, _: list[Piece]) -> bool:
        """Skip a repeated mark, which models write at times."""
        begun, marks = self._text.lstrip(), self._format.begin
        doubled = next((mark for mark in marks if mark.strip() and begun.startswith(mark)), None)
        if doubled is not None:
            begun = begun[len(doubled) :]
            self._raw[0] += self._text[: len(self._text) - len(begun)]
            self._text = begun
            return True
        if any(mark.startswith(begun) for mark in marks):
            return False  # it may become one
        self._state = "call"
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        reader = self._reader
        assert reader is not None
        taken = 0
        while taken < len(self._text) and not (reader.done or reader.broken):
            reader.feed(self._text[taken])
            taken += 1
        self._raw.append(self._text[:taken])
        self._text = self._text[taken:]
        if reader.broken:
            self._show(self._refused(), pieces)
            self._state = "text"
            return True
        if reader.name is not None:
            self._pass_on(reader, pieces)
        if reader.done:
            self._text = reader.spare + self._text
            self._state, self._marked = "after", False
        return True

    def _refused(self) -> str:
        """Return the mark with which no call begins, and the text after it that is not parsed
        again."""
        mark, rest = self._raw[0], "".join(self._raw[1:])
        if not mark.strip() and rest.startswith(self._format.within):
            mark, rest = mark + rest[:1], rest[1:]
        again = read_again_from(rest, self.marks)
        self._text = rest[again:] + self._text
        return mark + rest[:again]

    def _pass_on(self, reader: CallReader, pieces: list[Piece]) -> None:
        if not self._named:
            self._named = True
            self._calls += 1
            pieces.append(CallStart(self._calls - 1, str(reader.name)))
        if arguments := reader.take():
            pieces.append(CallArguments(self._calls - 1, arguments))

    def _after(self, pieces: list[Piece]) -> bool:
        self._text = self._text.lstrip(WHITE if self._marked else self._format.separators)
        if not self._text:
            return False
        for mark in self._format.end:
            if self._text.startswith(mark):
                self._text, self._marked = self._text[len(mark) :], True
                self._state = "first" if self._format.closes else "after"
                return True
            if mark.startswith(self._text):
                return False  # it may become the mark
        if self._text[0] in self._format.again:
            self._open()
        else:
            self._state = "first"
        return True

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Content(text))


class CallsOrText:
    """Reads an answer that is either calls, the first one of a known tool, or text as a whole
    (`pieces.Parser`). What looks like calls within text is text.

    Args:
        calls: finds calls; it has read nothing yet.
        tools: the names of the tools.
        heads: texts with one of which calls begin; none: their marks tell them from text.
    """

    def __init__(
        self, calls: ToolCallParser, tools: Collection[str], heads: Sequence[str] = ()
    ) -> None:
        self._calls = calls
        self._tools = tools
        self._heads = heads
        self._held = ""
        """Text while it is open what the answer is."""
        self._is_text: bool | None = None
        """Whether the answer is text; None: it is open."""

    def feed(self, text: str) -> list[Piece]:
        """See `Parser.feed`."""
        if self._is_text is not None:
            return self._read(text)
        # Characters one by one: the result must not depend on how the text is chunked.
        for place, char in enumerate(text, 1):
            self._held += char
            found = self._by_heads() if self._heads else self._calls.feed(char)
            if pieces := self._decide(found):
                return pieces + self._read(text[place:])
        return []

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        if self._is_text is None:
            return self._decide(self._calls.finish()) or self._read(self._held)
        return [] if self._is_text else self._calls.finish()

    def _by_heads(self) -> list[Piece]:
        """Return the first pieces, once it is certain whether the text begins with a head."""
        begun = self._held.lstrip()
        if begun.startswith(tuple(self._heads)):
            return self._calls.feed(self._held)
        return [] if any(head.startswith(begun) for head in self._heads) else [Content(self._held)]

    def _decide(self, pieces: list[Piece]) -> list[Piece]:
        """Decide by the first piece, if there is one; return what is certain now."""
        if not pieces:
            return []
        first = pieces[0]
        self._is_text = not (isinstance(first, CallStart) and first.name in self._tools)
        return [Content(self._held)] if self._is_text else pieces

    def _read(self, text: str) -> list[Piece]:
        """Return the pieces of more text, now that it is known what the answer is."""
        if self._is_text is False:
            return self._calls.feed(text)
        return [Content(text)] if text else []
