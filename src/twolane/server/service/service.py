"""The served model, which every endpoint asks: from a request to its generation."""

import hashlib
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.engine.kv.page_hash import salt_bytes
from twolane.engine.kv.prefix_digest import Landmarks
from twolane.frontend.answer_formats import ModelFormats
from twolane.frontend.body import shortened
from twolane.frontend.engine_client import EngineClient, EngineError
from twolane.frontend.generate_request import GenerateRequest
from twolane.frontend.generation import Generation
from twolane.frontend.pooling import NO_EMBEDDING, Embedding
from twolane.frontend.prepare import MostScores, Prepared, Preparer, Prompt
from twolane.frontend.sandbox import QueueFull, WorkerLost
from twolane.frontend.text.codec import TextError
from twolane.frontend.text.texts import Texts
from twolane.server.http.body_checks import BodyChecker
from twolane.server.http.calls import Call
from twolane.server.http.errors import ApiError, queue_full, worker_lost
from twolane.server.http.gate import CLIENT
from twolane.server.options import ServerOptions
from twolane.server.service import accounting
from twolane.server.service.admission import Admission
from twolane.server.service.availability import Availability
from twolane.server.service.late_guard import LateGuard

T = TypeVar("T")
MOST_SCORES = MostScores(prompts=1 << 20, answers=1 << 22)


class Service:
    """The served model.

    Args:
        engine: a running engine.
        texts: the model's tokenizer and chat template.
        model_name: the model's name for clients.
        options: bounds of the queue, and whether requests may have a priority.
        observer: counts what is admitted.
        embedding: the model's embeddings.
        sampling: fields of `SamplingParams`, for requests that say nothing of them.
        formats: formats of the model's answers; None: detected from its chat template.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        model_name: str,
        options: ServerOptions,
        observer: accounting.AdmissionObserver,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        formats: ModelFormats | None = None,
        embedding: Embedding = NO_EMBEDDING,
    ) -> None:
        self.engine = engine
        self.texts = texts
        self.codec = texts.codec
        self.model_name = model_name
        self.model_names = options.names(model_name)
        """All names of the model itself."""
        self._any_name = options.any_model_name
        self.sampling_defaults = sampling
        self.embedding = embedding
        self.created = int(time.time())
        self._allow_priority = options.allow_priority
        self.reasoning_field = options.reasoning_field
        """Field of chat answers for the thinking."""
        self.admission = Admission(
            options.max_queue, options.max_queued_per_key, lambda: engine.stats.prompt_token_seconds
        )
        secret = options.operator_key.encode() if options.operator_key else os.urandom(32)
        engine.prefixes.key = hashlib.sha256(b"hashes of prefixes" + secret).digest()
        self._salt_per_key = options.salt_per_key
        self.late_guard = LateGuard(engine, self.admission, on=options.refuse_late)
        self._observer = observer
        self.tracing: accounting.Tracer | None = None
        """Tracing of requests; None: not traced."""
        self.availability = Availability(engine, lambda: self.problem)
        formats = formats or ModelFormats(texts.template_source, shows_tools=texts.shows_tools)
        self.preparer = Preparer(engine, texts, formats, MOST_SCORES)
        self.body_checker = BodyChecker()
        """Checks large bodies in a sandbox."""

    @property
    def problem(self) -> str | None:
        """Reason why some requests cannot be read for the moment; None: all can."""
        return self.preparer.problem or self.body_checker.problem

    def check_model(self, name: str | None, param: str = "model") -> str:
        """Return the served model's or adapter's name for a requested one, the field `param`.

        Raises:
            ApiError: 404, there is no such model and no such adapter.
        """
        loaded = self.engine.adapters.loaded
        any_name = self._any_name and not loaded and param == "model"
        if name is None or name in self.model_names or any_name:
            return self.model_name
        if name not in loaded:
            raise self._unknown_model(name, param)
        return name

    def _unknown_model(self, name: str, param: str = "model") -> ApiError:
        problem = f"there is no model {shortened(name)!r} here; {self.model_name!r} is served"
        return ApiError(404, problem, code="model_not_found", param=param)

    async def prepare(self, asked: GenerateRequest, call: Call) -> Prepared:
        """Return a request after all checks, with all that is derived from it.

        Args:
            asked: the request; its adapter is the model's name as the client gives it.
            call: the HTTP call, whose latency bounds the request gets.

        Raises:
            ApiError: 400, 404, 429 or 503.
            FieldError: a field is out of range.
        """
        name = self.check_model(asked.adapter)
        adapter = None if name == self.model_name else name
        salt = self.salted(asked.cache_salt, call.key)
        request = replace(asked, adapter=adapter, slo=call.slo, cache_salt=salt, key=call.key)
        self.admission.check_count(request.answers, request.counted_by)
        if request.priority and not self._allow_priority:  # whoever has the best one has the server
            message = "priority: this server serves in order of arrival (see --allow-priority)"
            raise ApiError(400, message, code="unsupported_parameter", param="priority")
        work = self.preparer.prepare(request, CLIENT.get())
        return await self.refusing(work, request.prompt_field)

    async def prompts(self, asked: GenerateRequest) -> list[Prompt]:
        """Return the prompts of a request that is not to be answered here; see `prepare`."""
        self.admission.check_count(asked.answers, asked.counted_by)
        return await self.refusing(self.preparer.prompts(asked, CLIENT.get()), asked.prompt_field)

    async def count(self, asked: GenerateRequest) -> int:
        """Return the number of tokens of a conversation; see `prepare`."""
        self.check_model(asked.adapter)
        return await self.refusing(self.preparer.count(asked, CLIENT.get()), asked.prompt_field)

    async def refusing(self, work: Coroutine[Any, Any, T], field: str) -> T:
        """Wait for the sandboxes, unless the server is unavailable.

        Args:
            work: a method of the preparer.
            field: the field at fault where an error names none.

        Raises:
            ApiError: 400, 429 or 503.
            FieldError: a field cannot be served.
        """
        if self.availability.problem is not None:
            work.close()
        self.availability.check()
        try:
            return await work
        except TextError as error:
            self.availability.check()  # it may have been given up for that
            param = error.param or field
            raise ApiError(400, str(error), code="invalid_prompt", param=param) from error
        except FieldError:
            self.availability.check()
            raise
        except QueueFull as error:
            raise queue_full(str(error)) from error
        except WorkerLost as error:
            raise worker_lost(str(error)) from error
        except EngineError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    def salted(self, cache_salt: str | None, key: int | None) -> str | None:
        """Return the salt of a request that came with an API key."""
        return f"key {key} {cache_salt or ''}" if self._salt_per_key else cache_salt

    def landmarks(self, tokens: list[int], name: str | None, cache_salt: str | None) -> Landmarks:
        """Return the landmarks of a prompt to the model or adapter of this name."""
        adapter = self.engine.adapters.loaded.get(name or "")
        salt = salt_bytes(cache_salt, bytes.fromhex(adapter.digest) if adapter else b"")
        ready = self.engine.ready
        return Landmarks.of(tokens, ready.page_size, salt, states=ready.state_bytes > 0)

    def generate(self, prepared: Prepared, call: Call) -> Generation:
        """Admit a request and send it to the engine.

        Args:
            prepared: the request.
            call: the HTTP call, which is admitted here.

        Raises:
            ApiError: 404 (its adapter was unloaded while it was prepared), 429 or 503.
        """
        self.availability.check()
        request = prepared.request
        if request.adapter is not None and request.adapter not in self.engine.adapters.loaded:
            raise self._unknown_model(request.adapter)
        answers = [tokens for tokens in prepared.tokens for _ in range(request.n)]
        tokens = sum(map(len, answers))

        def reused(prompt: list[int]) -> int:
            marks = self.landmarks(prompt, request.adapter, request.cache_salt)
            return marks.reused(self.engine.prefixes.has)

        expected = self.late_guard.check(prepared.tokens, call, reused)
        self.admission.enter(len(answers), request.counted_by, key=call.key, tokens=tokens)
        if request.adapter is not None:
            self._observer.count_adapter(request.adapter, len(answers))
        traces: Sequence[accounting.TracedRequest] = ()
        if self.tracing is not None:
            name = request.adapter or self.model_name
            traces = accounting.begin_traces(self.tracing, prepared, name, answers, call)
        account = accounting.RequestAccounting(
            self.admission, self.availability, answers, call, traces
        )
        if expected is not None and len(answers) == 1 and prepared.params.grammar is None:
            account.on_first = self.late_guard.await_first(expected)
        try:
            return Generation(self.engine, self.codec, prepared, account)
        except EngineError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    async def close(self) -> None:
        """End the sandboxes."""
        self.availability.draining = True
        await self.body_checker.close()
        await self.preparer.close()
