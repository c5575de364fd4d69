"""Grammars that constrain answers: compiled beside the loop, with one matcher for each request."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from llguidance import LLMatcher, LLTokenizer

from twolane.common.grammars import parser_limits
from twolane.common.resources import usable_cores

KEPT_MATCHERS = 128
"""The compiler keeps this many compiled matchers, the latest, with what they have found out."""
KEPT_BYTES = 4 << 20
"""Their grammars have at most this many bytes together: one may take eighty times as many when it
is compiled."""
MOST_THREADS = 8
"""Masks are computed in at most this many threads."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or no more tokens can be matched against it."""


class Constraint:
    """What one request may say next, by its grammar.

    The loop tells it the tokens that are delivered; whoever asks for the mask, one at a time, in
    any thread, has the matcher take them first.

    Args:
        matcher: at its start.
        group: number of the matchers that share what they have found out about their grammar; one
            of a group at a time can compute a mask.
        vocab_size: of the model, which may have tokens that the tokenizer has not.
        stops: tokens that may end the answer where the grammar allows an end.
        eos_token_ids: what the matcher takes for an end.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        group: int,
        vocab_size: int,
        stops: Collection[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._matcher = matcher
        self.group = group
        self._bytes = -(-vocab_size // 8)
        self._stops = stops
        self._eos = eos_token_ids
        self._delivered: deque[int] = deque()
        """Tokens that the matcher has not taken."""

    def take(self, token: int) -> None:
        """Go on behind an output token that was delivered."""
        self._delivered.append(token)

    def mask(self) -> bytes:
        """Return a bit for each token of the vocabulary, the lowest first: whether it may be next.

        Raises:
            GrammarError: the grammar has become too complex for its limits.
        """
        while self._delivered:
            token = self._delivered.popleft()
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        mask = bytearray(self._matcher.compute_bitmask()[: self._bytes])
        if self._matcher.is_error():
            raise GrammarError(" ".join(self._matcher.get_error().split())[:500])
        mask.extend(bytes(self._bytes - len(mask)))
        if any(mask[eos // 8] >> eos % 8 & 1 for eos in self._eos):
            for token in self._stops:
                mask[token // 8] |= 1 << token % 8
        return bytes(mask)


class MaskThreads:
    """Computes masks beside the loop: the matchers give up Python's lock meanwhile.

    Those of a group are computed in one thread, since they would wait for each other.

    Args:
        notify: called from a thread when the masks of a batch are there.
        threads: number of threads; None: see `mask_threads`.
    """

    def __init__(self, notify: Callable[[], None], threads: int | None = None) -> None:
        self._notify = notify
        self._count = threads or mask_threads()
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="masks")

    def start(self, constraints: Sequence[Constraint]) -> Sequence[Future[bytes]]:
        """Compute the mask of each; a future has a `GrammarError` where there is none."""
        parts: list[list[tuple[Constraint, Future[bytes]]]] = [[] for _ in range(self._count)]
        masks: list[Future[bytes]] = [Future() for _ in constraints]
        for constraint, mask in zip(constraints, masks, strict=True):
            parts[constraint.group % len(parts)].append((constraint, mask))
        for part in parts:
            if part:
                self._threads.submit(self._compute, part)
        return masks

    def _compute(self, part: Sequence[tuple[Constraint, Future[bytes]]]) -> None:
        for constraint, mask in part:
            try:
                mask.set_result(constraint.mask())
            except BaseException as error:  # whoever asks for the mask raises it
                mask.set_exception(error)
        self._notify()


def mask_threads() -> int:
    """Return the number of threads that compute masks: a core each, as far as lanes leave some."""
    return max(1, min(MOST_THREADS, len(usable_cores()) // 4))


class Grammars:
    """Compiles grammars for a model's tokenizer, in a thread of its own.

    Args:
        tokenizer: the model's `tokenizer.json`.
        vocab_size: of the model.
        eos_token_ids: of the model; at least one.
        notify: called from that thread when a grammar has been compiled, or cannot be.
        groups: number of groups that the matchers of a grammar are divided into; None: one for
            each thread that computes masks.
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
        self._groups, self._made = groups or mask_threads(), count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def constraint(self, grammar: str, stops: Collection[int]) -> Future[tuple[Constraint, bytes]]:
        """Compile a grammar; the future has the constraint of one request and the mask of its
        first token, or a `GrammarError`."""
        found = self._thread.submit(self._constraint, grammar, stops)
        found.add_done_callback(lambda _: self._notify())
        return found

    def _constraint(self, grammar: str, stops: Collection[int]) -> tuple[Constraint, bytes]:
        group = next(self._made) % self._groups
        matcher = self._matcher(grammar, group).deep_copy()
        constraint = Constraint(matcher, group, self._vocab_size, stops, self._eos)
        return constraint, constraint.mask()

    def _matcher(self, grammar: str, group: int) -> LLMatcher:
        """The matcher of a group, at its start.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        matcher = self._compiled.get((grammar, group))
        if matcher is None:
            matcher = LLMatcher(self._vocabulary_now(), grammar, limits=parser_limits())
            if matcher.is_error():
                raise GrammarError(" ".join(matcher.get_error().split())[:500])
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
                self._vocabulary = LLTokenizer(self._tokenizer, eos_token=list(self._eos))
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer does not serve: {error}") from error
        return self._vocabulary
