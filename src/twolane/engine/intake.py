"""The way into the engine: a client's request is refused here, or waits for the system."""

import random
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.constrained.banned import Banned
from twolane.engine.constrained.bits import every_token, without_tokens
from twolane.engine.constrained.constraints import Constraint, GrammarError, Grammars
from twolane.engine.constrained.thinking import ThinkingBudget
from twolane.engine.kv.manager import Lookup
from twolane.engine.messages import Refused, Submit, Vocabulary
from twolane.engine.request import Request
from twolane.engine.state import State
from twolane.lanes.work import MAX_ENDS, Sampling
from twolane.sampling import check_token_ids


@dataclass(frozen=True)
class ServedModel:
    """The properties of the served model that requests are checked against."""

    vocab_size: int
    """Number of tokens in the model's vocabulary."""
    eos_token_ids: Sequence[int]
    """Tokens that end a request unless it ignores them."""
    max_model_len: int
    """The most tokens, prompt and output together, that one request can have."""


class Intake:
    """Makes requests of what clients submit, and holds back those that have to wait for others.

    Args:
        state: The engine's state, which has the waiting requests and collects refusals.
        model: The served model, with a context that the KV pool holds.
        adapters: those that requests may ask for.
        seed: Seed of requests without a seed of their own.
        notify: wakes the loop; called from another thread when a grammar has been compiled.
    """

    def __init__(
        self,
        state: State,
        model: ServedModel,
        adapters: AdapterRegistry,
        seed: int,
        notify: Callable[[], None],
    ) -> None:
        self._state, self._model, self._adapters = state, model, adapters
        self._eos_token_ids = tuple(model.eos_token_ids)
        self._seeds = random.Random(seed)
        self._notify = notify
        self._grammars: Grammars | None = None
        """Compiler of grammars; None until the API process has sent the vocabulary."""
        self._compiling: dict[str, tuple[Future[tuple[Constraint, bytes]], str | None]] = {}
        """Grammars of requests that are held back until they are compiled, and the requests'
        leaders, by the requests' ids."""

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take requests with grammars from now on."""
        names = self._model.vocab_size, self._eos_token_ids
        self._grammars = Grammars(vocabulary, *names, self._notify)

    def submit(self, message: Submit) -> None:
        """Let a request wait for the system, hold it back, or refuse it."""
        state = self._state
        state.submitted += 1
        problem = self._problem(message)
        if problem is not None:
            state.refused.append(problem)
            return
        # As an array: ints of their own take four times the memory, and pages' keys longer.
        now, tokens = state.now(), array("q", message.prompt)
        request = Request.from_submit(
            message,
            order=state.submitted,
            now=now,
            max_model_len=self._model.max_model_len,
            tokens=tokens,
            sampling=self._sampling(message),
            slo=state.pacer.planned(message.slo).over(state.slo),
            lookup=self._lookup,
            adapter=None if message.lora is None else self._adapters.find(message.lora),
        )
        self._set_mask(request, message)
        if message.params.grammar is not None:
            self._compile(request, message.params.grammar, message.leader)
        else:
            self._line_up(request, message.leader)
        state.requests[request.id] = request
        state.trace.request_begin(request.id, now, prompt_tokens=len(message.prompt))

    def take_compiled(self) -> bool:
        """Release requests whose grammars are compiled; return whether there were any."""
        compiled = [id for id, (found, _) in self._compiling.items() if found.done()]
        for id in compiled:
            (found, leader), state = self._compiling.pop(id), self._state
            for request in list(state.queue.held.get(_compiler_of(id), ())):
                try:
                    request.constraint, request.mask = found.result()
                except GrammarError as error:
                    state.fail_grammar(request, error)
                else:
                    state.queue.dequeue(request)
                    self._line_up(request, leader)
        return bool(compiled)

    def _set_mask(self, request: Request, message: Submit) -> None:
        """Set the mask of the first token, and what the later ones depend on, without a
        grammar."""
        size = self._model.vocab_size
        request.mask = message.rules.allowed
        if message.rules.banned:
            banned = Banned(message.rules.banned, request.mask or every_token(size))
            request.mask = banned.mask(request.tokens, request.prompt_tokens)
            request.rule = banned if banned.changes else None
        if message.rules.thinking is not None:
            assert message.params.thinking_token_budget is not None
            always = request.mask or every_token(size)
            budget = message.params.thinking_token_budget, message.rules.thinking
            request.rule = ThinkingBudget(*budget, request.tokens, always, request.rule)
            request.mask = request.rule.mask(request.tokens, request.prompt_tokens)

    def _compile(self, request: Request, grammar: str, leader: str | None) -> None:
        """Hold a request back until its grammar is compiled."""
        assert self._grammars is not None
        self._compiling[request.id] = self._grammars.constraint(grammar, request.stops), leader
        self._state.queue.hold(request, _compiler_of(request.id))

    def _line_up(self, request: Request, leader: str | None) -> None:
        """Let a request wait for the system, or for its leader's prompt."""
        request.leader = None
        if leader is not None and self._worth_holding(request, leader):
            self._state.queue.hold(request, leader)
        else:
            self._state.queue.enqueue(request)

    def _worth_holding(self, request: Request, leader_id: str) -> bool:
        """Return whether a request that waits for its leader finds full pages of its prompt."""
        kv, leader = self._state.kv, self._state.requests.get(leader_id)
        if leader is None or leader.generated or request.scores_prompt:
            return False
        return kv.prefix_cache and request.prompt_tokens > kv.page_size

    def _problem(self, message: Submit) -> Refused | None:
        if message.lora is not None and self._adapters.find(message.lora) is None:
            text = f"model {message.lora!r} does not exist: no adapter of that name is loaded"
            return Refused(message.id, "unknown_model", text, "model")
        if len(message.prompt) >= self._model.max_model_len:
            text = (
                f"prompt has {len(message.prompt)} tokens, which leaves no room for output: "
                f"the context length is {self._model.max_model_len}"
            )
            return Refused(message.id, "too_long", text, "prompt")
        try:
            self._check_tokens(message)
        except FieldError as error:
            return Refused(message.id, "invalid", str(error), error.field)
        return None

    def _check_tokens(self, message: Submit) -> None:
        """Refuse a request whose tokens the model does not have, or that leaves none to choose.

        Raises:
            FieldError: naming the request's field.
        """
        if not message.prompt:
            raise FieldError("prompt", "is empty")
        params, banned, size = message.params, message.rules.banned, self._model.vocab_size
        words = [token for sequence in banned for token in sequence]
        named = {"prompt": message.prompt, **params.token_ids, "bad_words": words}
        named["stop_token_ids"] = (*params.stop_token_ids, *message.rules.ends)
        named["thinking_token_budget"] = thinking = message.rules.thinking or ()
        for name, tokens in named.items():
            check_token_ids(name, tokens, size)
        if params.allowed_token_ids is not None:
            raise FieldError("allowed_token_ids", "must come as the mask of the rules")
        if params.grammar is not None and self._grammars is None:
            raise FieldError("grammar", "needs a model with a tokenizer")
        allowed = message.rules.allowed or every_token(size)
        if len(allowed) != -(-size // 8) or not any(allowed):
            raise FieldError("allowed_token_ids", "must be a mask of the vocabulary's tokens")
        ends = {*params.stop_token_ids, *self._ends(message)} if params.min_tokens else set()
        if len(ends) > MAX_ENDS:
            raise FieldError("stop_token_ids", f"are more than {MAX_ENDS} with the model's own")
        if ends and not any(without_tokens(allowed, ends)):
            raise FieldError("stop_token_ids", "leave no token to choose before min_tokens")
        left = without_tokens(allowed, {sequence[-1] for sequence in banned})
        if thinking and not left[thinking[1] // 8] >> thinking[1] % 8 & 1:
            raise FieldError("thinking_token_budget", "needs the end of thinking to be allowed")
        if thinking and thinking[1] in ends:
            raise FieldError("thinking_token_budget", "ends the answer before min_tokens")
        if banned and not any(without_tokens(left, ends)):
            raise FieldError("bad_words", "may leave no token to choose")

    def _ends(self, message: Submit) -> tuple[int, ...]:
        """Return the tokens that end the request unless it ignores them."""
        return tuple(dict.fromkeys((*self._eos_token_ids, *message.rules.ends)))

    def _sampling(self, message: Submit) -> Sampling:
        drawn = self._seeds.getrandbits(63)
        seed = drawn if message.params.seed is None else message.params.seed
        # Lanes get masks instead.
        params = replace(message.params, grammar=None, bad_words=(), thinking_token_budget=None)
        return Sampling(params, seed, len(message.prompt), self._ends(message))

    def _lookup(self, request: Request) -> Lookup:
        kv = self._state.kv
        if request.looked_up is None or request.looked_up.version != kv.tree.version:
            request.looked_up = kv.lookup(
                request.tokens,
                reuse=not request.scores_prompt,
                before=request.looked_up,
                salt=request.salt,
            )
        return request.looked_up


def _compiler_of(request_id: str) -> str:
    """Return the key in `WaitingQueue.held` of a request whose grammar is being compiled; it is no
    request's id."""
    return f"compiler of {request_id}"
