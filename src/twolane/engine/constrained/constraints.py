"""Grammars that constrain answers: compiled beside the loop, with one matcher for each request."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import count

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from twolane.common.grammars import parser_limits, problem_of
from twolane.common.resources import usable_cores, yield_processor

KEPT_MATCHERS = 128
"""The compiler keeps this many compiled matchers, the latest, with what they have found out."""
KEPT_BYTES = 4 << 20
"""Their grammars have at most this many bytes together: one may take eighty times as many when it
is compiled."""
COMPILER_NICENESS = 5
"""By so much the thread that compiles grammars yields to those that decode; see nice(2)."""
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *[rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (4, 8, 16, 30)],
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Tokens that match one of these, the first that does, are looked at together: space, and text of a
string of so many characters. With llguidance's own, which lack 4, 8 and 16, the masks of strings
that are bounded take a third longer at their 99th percentile."""
MOST_THREADS = 8
"""Masks are computed in at most this many threads."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or no more tokens can be matched against it."""


class Constraint:
    """What one request may say next, by its grammar.

    The loop tells it the tokens that are delivered; whoever computes the mask, one at a time, in
    any thread, has the matcher take them first.

    Args:
        matcher: at its start.
        words: 32-bit words of its masks, by the tokenizer's vocabulary.
        group: number of the matchers that share what they have found out about their grammar; one
            of a group at a time can compute a mask.
        vocab_size: of the model, which may have tokens that the tokenizer has not.
        stops: tokens that may end the answer where the grammar allows an end.
        eos_token_ids: what the matcher takes for an end.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        group: int,
        vocab_size: int,
        stops: Collection[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self.matcher, self.words, self.group = matcher, words, group
        self._bytes = -(-vocab_size // 8)
        self._stops = stops
        self._eos = eos_token_ids
        self._delivered: deque[int] = deque()
        """Tokens that the matcher has not taken."""

    def take(self, token: int) -> None:
        """Go on behind an output token that was delivered."""
        self._delivered.append(token)

    def advance(self) -> None:
        """Have the matcher take all tokens that were delivered."""
        while self._delivered:
            token = self._delivered.popleft()
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token)

    def mask(self, words: bytes) -> bytes | GrammarError:
        """Return a bit for each token of the model, the lowest first: whether it may be next.

        Args:
            words: what the matcher has just computed.

        Returns:
            The mask; an error if the grammar has become too complex for its limits.
        """
        if (problem := problem_of(self.matcher)) is not None:
            return GrammarError(problem)
        mask = words[: self._bytes].ljust(self._bytes, b"\0")
        if not any(mask[eos // 8] >> eos % 8 & 1 for eos in self._eos):
            return mask
        ended = bytearray(mask)
        for token in self._stops:
            ended[token // 8] |= 1 << token % 8
        return bytes(ended)


class Masks:
    """Computes masks beside the loop, those of a call side by side.

    One call of the library computes all of them, because each return to Python waits for the
    interpreter's lock.

    Args:
        notify: called from a thread when the masks of a call are there.
        threads: number of the library's threads; None: see `mask_threads`.
    """

    def __init__(self, notify: Callable[[], None], threads: int | None = None) -> None:
        self._notify = notify
        self._count = threads or mask_threads()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, constraints: Sequence[Constraint]) -> Future[Sequence[bytes | GrammarError]]:
        """Compute the mask of each; at least one, all of one vocabulary."""
        masks = self._thread.submit(self._compute, constraints)
        masks.add_done_callback(lambda _: self._notify())
        return masks

    @cached_property
    def _executor(self) -> LLExecutor:
        """Starts its threads with the first masks."""
        return LLExecutor(self._count)

    def _compute(self, constraints: Sequence[Constraint]) -> Sequence[bytes | GrammarError]:
        for constraint in constraints:
            constraint.advance()
        # Neighbours go to one thread: those of a group would wait for each other in several.
        order = sorted(range(len(constraints)), key=lambda place: constraints[place].group)
        board = np.zeros((len(constraints), constraints[0].words), np.int32)
        matchers = [(constraints[place].matcher, place) for place in order]
        fill_next_token_bitmask_par(self._executor, matchers, board)
        return [each.mask(row.tobytes()) for each, row in zip(constraints, board, strict=True)]


def mask_threads() -> int:
    """Return the number of threads that compute masks: a core each, as far as lanes leave some."""
    return max(1, min(MOST_THREADS, len(usable_cores()) // 2))


class Grammars:
    """Compiles grammars for a model's tokenizer, in a thread of its own.

    Args:
        tokenizer: the model's `tokenizer.json`.
        vocab_size: of the model.
        eos_token_ids: of the model; at least one.
        notify: called from that thread when a grammar has been compiled, or cannot be.
        groups: number of groups that the matchers of a grammar are divided into; None: two for
            each thread that computes masks, which are as many pieces as the library makes.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        notify: Callable[[], None],
        groups: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._notify = notify
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, int], LLMatcher] = OrderedDict()
        """The matchers that those of a grammar's group are copied from."""
        self._kept_bytes = 0
        self._groups, self._made = groups or 2 * mask_threads(), count()
        self._thread = ThreadPoolExecutor(
            1, "grammars", initializer=yield_processor, initargs=(COMPILER_NICENESS,)
        )

    def constraint(self, grammar: str, stops: Collection[int]) -> Future[tuple[Constraint, bytes]]:
        """Compile a grammar; the future has the constraint of one request and the mask of its
        first token, or a `GrammarError`."""
        found = self._thread.submit(self._constraint, grammar, stops)
        found.add_done_callback(lambda _: self._notify())
        return found

    def _constraint(self, grammar: str, stops: Collection[int]) -> tuple[Constraint, bytes]:
        group = next(self._made) % self._groups
        matcher = self._matcher(grammar, group).deep_copy()
        words = -(-self._vocabulary_now().vocab_size // 32)
        constraint = Constraint(matcher, words, group, self._vocab_size, stops, self._eos)
        mask = constraint.mask(matcher.compute_bitmask())
        if isinstance(mask, GrammarError):
            raise mask
        return constraint, mask

    def _matcher(self, grammar: str, group: int) -> LLMatcher:
        """The matcher of a group, at its start.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        matcher = self._compiled.get((grammar, group))
        if matcher is None:
            matcher = LLMatcher(self._vocabulary_now(), grammar, limits=parser_limits())
            if (problem := problem_of(matcher)) is not None:
                raise GrammarError(problem)
            self._compiled[grammar, group] = matcher
            self._kept_bytes += len(grammar)
            while self._kept_bytes > KEPT_BYTES or len(self._compiled) > KEPT_MATCHERS:
                (oldest, _), _ = self._compiled.popitem(last=False)
                self._kept_bytes -= len(oldest)
        else:
            self._compiled.move_to_end((grammar, group))
        return matcher

    def _vocabulary_now(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, made once.

        Raises:
            GrammarError: it does not go with the model, as one without the model's end tokens.
        """
        if self._vocabulary is None:
            try:
                self._vocabulary = LLTokenizer(
                    self._tokenizer, eos_token=list(self._eos), slices=list(SLICES)
                )
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer does not serve: {error}") from error
        return self._vocabulary
