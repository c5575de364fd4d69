"""Bounds on grammars, which the API process checks and the engine relies on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 512 * 2**10
"""A grammar may be at most this many bytes long, after it was made from a schema."""

MOST_RULES = 500
"""A grammar may have this many rules, and a schema this many different references: the compiler
follows chains of them by recursion, which ends the process at some thousands."""
MOST_PATTERNS = 64
"""An object of a schema may have this many `patternProperties`: the compiler takes the difference
of each two of them, whose time grows with their cube."""
MOST_OPTIONAL = 400
"""An object of a schema may have this many properties that are not `required`: any of them may come
next, and their masks take up to 3 ms."""
TAKING_SECONDS, TAKING_TOKEN_SECONDS = 0.05, 0.001
"""Seconds of processor time that a grammar may use to take the tokens of an answer, and more for
each token: the library holds the interpreter's lock meanwhile. Harmless grammars take up to 0.5 ms
for a token, and 10 ms for one of the first; an ambiguous one takes longer with each."""
AMBIGUOUS = "it is too ambiguous: each token takes milliseconds to match, and more with each"
NOTHING_FITS = "no text that the model can write fits it"
NOTHING_LEFT = ("NoExtension", "NoExtensionBias")
"""What a matcher says for that."""
UNSAID = "<non-verbose/>"
"""What stands in a matcher's errors for details that it leaves out."""
MOST_SAID = 450
"""An error message has at most this many characters of what a matcher says is wrong."""


def matcher_of(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Return a matcher of a grammar, which says what is wrong with it to `problem_of` alone: the
    library would write it to standard error, where clients could fill the log."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())


def problem_of(matcher: "LLMatcher") -> str | None:
    """Return what is wrong with a matcher's grammar or with a token that it took, on one line."""
    if not matcher.is_error():
        return None
    said = " ".join(matcher.get_error().replace(UNSAID, "").split())
    return NOTHING_FITS if said in NOTHING_LEFT else said[:MOST_SAID]


def takes_too_long(seconds: float, tokens: int) -> bool:
    """Return whether a grammar has taken too much processor time for its number of tokens."""
    return seconds > TAKING_SECONDS + TAKING_TOKEN_SECONDS * tokens


def parser_limits() -> "LLParserLimits":
    """Return the limits on a grammar's compilation and on each of its masks.

    With them, compiling takes up to about 0.3 s and a mask mostly 15 ms, but up to 0.4 s where
    thousands of objects may begin. The engine lets no other request wait for such masks.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
