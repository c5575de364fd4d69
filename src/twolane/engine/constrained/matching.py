"""Bounds on grammars, which the API process checks and the engine relies on."""

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 512 * 2**10
"""Largest size of a grammar in bytes, after conversion from a schema."""

MAX_RULES = 500
"""Most rules of a grammar and most distinct references of a schema: the compiler follows chains of
them by recursion, which crashes the process at some thousands."""
MAX_PATTERNS = 64
"""Most `patternProperties` of an object in a schema: the compiler subtracts each pair of them, in
time cubic in their number."""
MAX_OPTIONAL = 400
"""Most optional properties of an object in a schema: any of them may come next, and their masks
take up to 3 ms."""
MATCHING_SECONDS, MATCHING_TOKEN_SECONDS = 0.05, 0.001
"""CPU seconds that matching an answer may take, and more for each token: the library holds the GIL
meanwhile. Harmless grammars take up to 0.5 ms a token, and 10 ms for one of the first; an ambiguous
one takes longer with each."""
AMBIGUOUS = "it is too ambiguous: each token takes milliseconds to match, and more with each"
NOTHING_FITS = "no text that the model can write fits it"
NOTHING_FITS_ERRORS = ("NoExtension", "NoExtensionBias")
"""Errors of a matcher that mean `NOTHING_FITS`."""
OMITTED_DETAILS = "<non-verbose/>"
"""Placeholder in a matcher's errors for details that it leaves out."""
MAX_ERROR_CHARACTERS = 450
"""Most characters of a matcher's error that an error message quotes."""


class Matching(NamedTuple):
    """A vocabulary as matchers take it."""

    tokenizer: "LLTokenizer"
    chooses: bool
    """Whether the model chooses the tokens of a text to which the grammar has no alternative. If
    not, they are those of `vocabulary.Vocabulary.exact`, which models write best."""


def matcher_of(vocabulary: Matching, grammar: str) -> "LLMatcher":
    """Return a matcher of a grammar in llguidance's format.

    It reports errors through `problem_of` only: by default the library writes them to standard
    error, where clients could fill the log.
    """
    from llguidance import LLMatcher

    try:
        [first, *others] = json.loads(grammar)["grammars"]
    except (ValueError, TypeError, LookupError):
        first, others = {"lark_grammar": grammar}, []
    options = json.dumps({"no_forcing": vocabulary.chooses})
    chosen = {"lark_grammar": f"%llguidance {options}\nstart: @whole"}
    whole = json.dumps({"grammars": [chosen, {**first, "name": "whole"}, *others]})
    return LLMatcher(vocabulary.tokenizer, whole, log_level=0, limits=parser_limits())


def problem_of(matcher: "LLMatcher") -> str | None:
    """Return the error of a matcher's grammar or latest token on one line; None: there is none."""
    if not matcher.is_error():
        return None
    problem = " ".join(matcher.get_error().replace(OMITTED_DETAILS, "").split())
    return NOTHING_FITS if problem in NOTHING_FITS_ERRORS else problem[:MAX_ERROR_CHARACTERS]


def matching_takes_too_long(seconds: float, tokens: int) -> bool:
    """Return whether matching took too much CPU time for this number of tokens."""
    return seconds > MATCHING_SECONDS + MATCHING_TOKEN_SECONDS * tokens


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
