"""Grammars that constrain answers: compiled beside the loop, with one matcher for each request."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from twolane.common.resources import usable_cores, yield_processor
from twolane.engine.constrained import matching
from twolane.engine.constrained.bits import with_tokens
from twolane.engine.constrained.vocabulary import Vocabulary

KEPT_MATCHERS = 128
"""The compiler keeps this many compiled matchers, the latest, with what they have found out."""
KEPT_BYTES = 4 << 20
"""Their grammars have at most this many bytes together: one may take eighty times as many when it
is compiled."""
COMPILER_NICENESS = 5
"""Niceness (nice(2)) that the thread that compiles grammars adds to its own: it yields to those
that decode."""
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *[rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (4, 8, 16, 30)],
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Tokens that match the same one of these first are looked at together: space, and text of a string
by its number of characters. With llguidance's own, which lack 4, 8 and 16, the masks of strings
that are bounded take a third longer at their 99th percentile."""
MAX_THREADS = 8
"""Masks are computed in at most this many threads."""
SUSPECT_SECONDS = 0.01
"""Seconds of a call after which the next mask of each of its grammars is computed by itself, and
its processor time measured."""
SLOW_MASK_SECONDS = 0.005
"""A grammar of which one mask took this many seconds of processor time is slow from then on."""
SLOW_COMPILE_SECONDS = 0.03
"""A grammar that took this many seconds of processor time to compile is slow: its masks may take as
long, in whichever place."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or no more tokens can be matched against it."""


class MaskPace:
    """Whether a grammar's masks are slow to compute; all its requests share the answer.

    Launches wait for the masks of their rows, so that one slow mask would hold up all rows. A row
    whose grammar is `apart` sits out launches until its mask is known.
    """

    def __init__(self) -> None:
        self._suspect = self._slow = False

    @property
    def apart(self) -> bool:
        """Whether its masks are computed apart from others, and no launch waits for one."""
        return self._slow or self._suspect

    def suspect(self) -> None:
        """Note that a call with one of its masks took long."""
        self._suspect = True

    def note(self, seconds: float, most: float = SLOW_MASK_SECONDS) -> None:
        """Note the processor time of one mask, or of something else that should take less."""
        self._suspect = False
        self._slow |= seconds >= most


class Constraint:
    """The grammar's state in one request.

    The loop adds delivered tokens. The thread that computes the mask, one at a time, has the
    matcher take them first.

    Args:
        matcher: A matcher at its start.
        words: 32-bit words of its masks, by the tokenizer's vocabulary.
        group: number of the matchers that share what they have found out about their grammar; one
            of a group at a time can compute a mask.
        pace: The pace of the grammar.
        vocab_size: The model's number of tokens, which may exceed the tokenizer's.
        stops: tokens that may end the answer where the grammar allows an end.
        eos_token_ids: Tokens that the matcher takes for an end.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        group: int,
        pace: MaskPace,
        vocab_size: int,
        stops: Collection[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self.matcher, self.words, self.group, self.pace = matcher, words, group, pace
        self._bytes = -(-vocab_size // 8)
        self._stops = stops
        self._eos = eos_token_ids
        self._delivered: deque[int] = deque()
        """Tokens that the matcher has not taken."""
        self._seconds, self._taken = 0.0, 0
        """Processor time of the tokens that it has taken, and their number."""
        self.ambiguous = False
        """Whether matching was given up because tokens took too long."""

    def take(self, token: int) -> None:
        """Add a delivered output token."""
        self._delivered.append(token)

    def advance(self) -> None:
        """Have the matcher take all tokens that were delivered."""
        while self._delivered:
            token = self._delivered.popleft()
            if not (self.ambiguous or self.matcher.is_stopped()):
                began = time.thread_time()
                self.matcher.consume_token(token)
                self._seconds += time.thread_time() - began
                self._taken += 1
                self.ambiguous = matching.matching_takes_too_long(self._seconds, self._taken)

    def mask(self, words: bytes) -> bytes | GrammarError:
        """Return a bit for each token of the model, the lowest first: whether it may be next.

        Args:
            words: The words that the matcher has just computed.

        Returns:
            The mask; an error if the grammar has become too complex for its limits.
        """
        problem = matching.AMBIGUOUS if self.ambiguous else matching.problem_of(self.matcher)
        if problem is not None:
            return GrammarError(problem)
        mask = words[: self._bytes].ljust(self._bytes, b"\0")
        if not any(mask[eos // 8] >> eos % 8 & 1 for eos in self._eos):
            return mask
        return with_tokens(mask, self._stops)


class Masks:
    """Computes masks beside the loop.

    One call of the library computes those of a turn, because each return to Python waits for the
    interpreter's lock. Masks of slow grammars are computed by themselves.

    Args:
        notify: called from a thread when the masks of a call are there.
        threads: number of the library's threads; None: see `mask_threads`.
    """

    def __init__(self, notify: Callable[[], None], threads: int | None = None) -> None:
        self._notify = notify
        self._count = threads or mask_threads()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._board = np.zeros(0, np.int32)
        """Memory for masks, which only the thread uses."""
        self._apart = ThreadPoolExecutor(
            self._count, "slow masks", initializer=yield_processor, initargs=(COMPILER_NICENESS,)
        )

    def start(self, constraints: Sequence[Constraint]) -> Future[Sequence[bytes | GrammarError]]:
        """Compute the mask of each; at least one, all of one vocabulary."""
        return self._notifying(self._thread.submit(self._compute, constraints))

    def start_apart(self, constraint: Constraint) -> Future[Sequence[bytes | GrammarError]]:
        """Compute one mask, which may take long, and measure it."""
        return self._notifying(self._apart.submit(_compute_apart, constraint))

    def _notifying(
        self, masks: Future[Sequence[bytes | GrammarError]]
    ) -> Future[Sequence[bytes | GrammarError]]:
        masks.add_done_callback(lambda _: self._notify())
        return masks

    @cached_property
    def _executor(self) -> LLExecutor:
        """Starts its threads with the first masks."""
        return LLExecutor(self._count)

    def _compute(self, constraints: Sequence[Constraint]) -> Sequence[bytes | GrammarError]:
        began = time.monotonic()
        for constraint in constraints:
            constraint.advance()
        # Neighbours go to one thread: those of a group would wait for each other in several.
        order = sorted(range(len(constraints)), key=lambda place: constraints[place].group)
        board = self._board_of(len(constraints), constraints[0].words)
        serve = [place for place in order if not constraints[place].ambiguous]
        matchers = [(constraints[place].matcher, place) for place in serve]
        if matchers:
            fill_next_token_bitmask_par(self._executor, matchers, board)
        if time.monotonic() - began >= SUSPECT_SECONDS:
            for constraint in constraints:
                constraint.pace.suspect()
        return [each.mask(row.tobytes()) for each, row in zip(constraints, board, strict=True)]

    def _board_of(self, rows: int, words: int) -> npt.NDArray[np.int32]:
        """Room for masks, the same as before if it suffices: new memory costs a step's masks 0.3
        ms."""
        if self._board.size < rows * words:
            self._board = np.zeros(rows * words, np.int32)
        return self._board[: rows * words].reshape(rows, words)


def _compute_apart(constraint: Constraint) -> Sequence[bytes | GrammarError]:
    began = time.thread_time()
    constraint.advance()
    words = b"" if constraint.ambiguous else constraint.matcher.compute_bitmask()
    constraint.pace.note(time.thread_time() - began)
    return [constraint.mask(words)]


def mask_threads() -> int:
    """Return the number of threads that compute masks: a core each, as far as lanes leave some."""
    return max(1, min(MAX_THREADS, len(usable_cores()) // 2))


class Grammars:
    """Compiles grammars for a model's tokenizer, in a thread of its own.

    Args:
        vocabulary: The texts of the tokenizer's tokens.
        vocab_size: The model's number of tokens.
        eos_token_ids: The model's end tokens; at least one.
        notify: called from that thread when a grammar has been compiled, or cannot be.
        groups: number of groups that the matchers of a grammar are divided into; None: two for
            each thread that computes masks, which are as many pieces as the library makes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        notify: Callable[[], None],
        groups: int | None = None,
    ) -> None:
        self._texts = vocabulary
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._notify = notify
        self._vocabulary: matching.Matching | None = None
        self._compiled: OrderedDict[tuple[str, int], tuple[LLMatcher, MaskPace]] = OrderedDict()
        """The matchers that those of a grammar's group are copied from."""
        self._paces: WeakValueDictionary[str, MaskPace] = WeakValueDictionary()
        """The pace of each grammar that is kept or that a request has, by grammar."""
        self._kept_bytes = 0
        self._groups, self._made = groups or 2 * mask_threads(), count()
        self._thread = ThreadPoolExecutor(
            1, "grammars", initializer=yield_processor, initargs=(COMPILER_NICENESS,)
        )

    def constraint(self, grammar: str, stops: Collection[int]) -> Future[tuple[Constraint, bytes]]:
        """Compile a grammar; the future has the constraint of one request and the mask of its
        first token, or a `GrammarError`."""
        compiling = self._thread.submit(self._constraint, grammar, stops)
        compiling.add_done_callback(lambda _: self._notify())
        return compiling

    def _constraint(self, grammar: str, stops: Collection[int]) -> tuple[Constraint, bytes]:
        group = next(self._made) % self._groups
        kept, pace = self._matcher(grammar, group)
        matcher = kept.deep_copy()
        words = -(-self._vocabulary_now().tokenizer.vocab_size // 32)
        constraint = Constraint(matcher, words, group, pace, self._vocab_size, stops, self._eos)
        [mask] = _compute_apart(constraint)
        if isinstance(mask, GrammarError):
            raise mask
        return constraint, mask

    def _matcher(self, grammar: str, group: int) -> tuple[LLMatcher, MaskPace]:
        """Return the matcher of a group, at its start, and the grammar's pace.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        found = self._compiled.get((grammar, group))
        if found is not None:
            self._compiled.move_to_end((grammar, group))
            return found
        vocabulary, began = self._vocabulary_now(), time.thread_time()
        matcher = matching.matcher_of(vocabulary, grammar)
        if (problem := matching.problem_of(matcher)) is not None:
            raise GrammarError(problem)
        pace = self._paces.setdefault(grammar, MaskPace())
        pace.note(time.thread_time() - began, SLOW_COMPILE_SECONDS)
        self._compiled[grammar, group] = matcher, pace
        self._kept_bytes += len(grammar)
        while self._kept_bytes > KEPT_BYTES or len(self._compiled) > KEPT_MATCHERS:
            (oldest, _), _ = self._compiled.popitem(last=False)
            self._kept_bytes -= len(oldest)
        return matcher, pace

    def _vocabulary_now(self) -> matching.Matching:
        """Return the vocabulary as matchers take it, made once.

        Raises:
            GrammarError: it does not go with the model, as one without the model's end tokens.
        """
        if self._vocabulary is None:
            try:
                self._vocabulary = self._texts.matching(self._eos, SLICES)
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer does not serve: {error}") from error
        return self._vocabulary
