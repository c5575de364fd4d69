"""Facts of a request that routing uses, read from its body or asked of a replica."""

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from contextlib import suppress
from itertools import pairwise

import aiohttp
import msgspec
from starlette.datastructures import Headers

from twolane.common.checked_json import UNREADABLE
from twolane.engine.kv.prefix_digest import Landmarks
from twolane.fleet.calls import ClientCall, forwarded_headers
from twolane.fleet.pool import Member, Pool
from twolane.router.state import MAX_NUMBER, RoutedRequest

LANDMARKS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Paths whose prompts have landmarks, with the last part of the replica's path that computes
them."""
RESPONSES = "/v1/responses"
GENERATING_PATHS = (*LANDMARKS, RESPONSES, "/v1/messages")
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
"""A response's id: the first match in an answer of `RESPONSES`, or in its first event, is its
own."""
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4,}")
"""The id of an item of a response's output, which has the response's id in it."""
RESPONSE_HEAD = 1024
"""First bytes of an answer, which contain its id."""
KNOWN_RESPONSES = 65536
"""Most responses whose replica is remembered."""
LANDMARK_SECONDS = 1.0
"""Seconds within which a replica must return a prompt's landmarks; else none are known."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of a body for each prompt token where the prompt is not tokenised."""
USUAL_OUTPUT, MAX_OUTPUT = 256, 1 << 20
"""Assumed tokens of an answer without a limit, and the largest limit that the router counts."""


class _Item(msgspec.Struct):
    """What of an item may refer to another one."""

    type: str | None = None
    id: str | None = None


class _Body(msgspec.Struct):
    """Fields of a request's body that the router reads."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None
    model: str | None = None
    previous_response_id: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def response(self) -> str | None:
        """The earlier response that is continued, or has the first item that is referred to."""
        if self.previous_response_id is not None:
            return self.previous_response_id
        with suppress(*UNREADABLE):
            for item in msgspec.json.decode(self.input, type=list[_Item]):
                found = item.type in (None, "item_reference") and ITEM_ID.fullmatch(item.id or "")
                if found:
                    return f"resp_{found[1]}"
        return None

    @property
    def max_output(self) -> int:
        """Limit on the answer's tokens as the router counts it."""
        requested = self.max_completion_tokens or self.max_tokens or USUAL_OUTPUT
        return min(max(requested, 1), MAX_OUTPUT)


class _Landmarks(msgspec.Struct):
    """An answer of /fleet/landmarks."""

    prompt_tokens: int
    tokens: list[int]
    hashes: list[int]
    token_ids: list[int] | None = None
    states: bool = False

    @property
    def sound(self) -> bool:
        """Whether there are as many prefixes as hashes, shortest first and within the prompt."""
        lengths = (0, *self.tokens, self.prompt_tokens + 1)
        ascending = all(shorter < longer for shorter, longer in pairwise(lengths))
        return (
            len(self.tokens) == len(self.hashes)
            and ascending
            and 0 < self.prompt_tokens < MAX_NUMBER
        )


class RoutingFacts:
    """Collects the facts of requests that routing uses.

    Args:
        pool: the replicas.
        session: HTTP client for requests to replicas.
        max_body_bytes: bytes that a body may have.
    """

    def __init__(self, pool: Pool, session: aiohttp.ClientSession, max_body_bytes: int) -> None:
        self._pool = pool
        self._session = session
        self._max_body_bytes = max_body_bytes
        self._responses: OrderedDict[str, str] = OrderedDict()
        """Name of the replica that answered, by response id."""

    async def ask(self, call: ClientCall) -> tuple[ClientCall, RoutedRequest]:
        """Return the request, with its prompt's tokens if known, and the facts for the router."""
        headers, body = Headers(scope=call.scope), call.body
        known = _known(body)
        call = call._replace(homes=self._homes(call.path, known))
        marks = None
        if call.path in LANDMARKS and len(self._pool.serving) > 1:
            marks = await self._landmarks(call, LANDMARKS[call.path])
            extended = _with_tokens(body, marks)
            if len(extended) <= self._max_body_bytes:  # a replica refuses larger ones
                call = call._replace(body=extended)
        session = headers.get("x-session-id") or known.user
        return call, RoutedRequest(
            prompt_tokens=marks.prompt_tokens if marks else max(1, len(body) // BYTES_PER_TOKEN),
            output_tokens=known.max_output,
            landmarks=Landmarks(marks.tokens, marks.hashes, marks.states) if marks else Landmarks(),
            ttft=_bound(call.path, headers.get("x-slo-ttft-ms", "")),
            session=session and session_key(session),
        )

    def least(self, headers: Headers, path: str) -> RoutedRequest:
        """Return the least that a request may be by its headers, before its body is read."""
        # The prompt of another fleet's request may be cached at some replica.
        alone = len(self._pool.serving) == 1
        length = int(headers["content-length"]) if alone else 0
        return RoutedRequest(
            prompt_tokens=max(1, length // BYTES_PER_TOKEN),
            output_tokens=1,
            ttft=_bound(path, headers.get("x-slo-ttft-ms", "")),
        )

    def note_response(self, call: ClientCall, member: Member, begun: bytes) -> None:
        """Remember from the head of an answer which replica may have stored the response."""
        if call.path == RESPONSES and (match := RESPONSE_ID.search(begun)):
            self._responses[match[1].decode()] = member.name
            if len(self._responses) > KNOWN_RESPONSES:
                self._responses.popitem(last=False)

    def _homes(self, path: str, known: _Body) -> frozenset[str]:
        """Return the replicas that have a request's adapter or earlier response; empty: any will
        do, or none has it and will say so."""
        response = known.response if path.startswith(RESPONSES) else None
        if response is None and path.startswith(f"{RESPONSES}/"):
            response = path.removeprefix(f"{RESPONSES}/").partition("/")[0]
        if (home := self._responses.get(response or "")) is not None:
            return frozenset((home,))
        if known.model not in self._pool.broadcast.adapters:
            return frozenset()
        serving = self._pool.serving
        return frozenset(each.name for each in serving if known.model in each.adapters)

    async def _landmarks(self, call: ClientCall, kind: str) -> _Landmarks | None:
        """Ask the replica with the fewest open requests for a prompt's landmarks; None: no
        answer."""
        member = min(self._pool.serving, key=lambda each: each.open)
        try:
            async with (
                asyncio.timeout(LANDMARK_SECONDS),
                self._session.post(
                    f"{member.url}/fleet/landmarks/{kind}?token_ids=true",
                    data=call.body,
                    headers=forwarded_headers(call.scope, self._pool.operator),
                ) as answer,
            ):
                if answer.status != 200:  # the replica that it is sent to says what is wrong
                    return None
                marks = msgspec.json.decode(await answer.read(), type=_Landmarks)
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            return None
        return marks if marks.sound else None


def _bound(path: str, milliseconds: str) -> float | None:
    """Return the TTFT bound in seconds that a header sets; None: the replica's default. Requests
    that generate nothing have no bound and are never refused."""
    if path not in GENERATING_PATHS:
        return math.inf
    with suppress(ValueError):  # the replica says what is wrong
        if 0.0 < (seconds := float(milliseconds) / 1e3) < math.inf:
            return seconds
    return None


def _known(body: bytes) -> _Body:
    """Read the router's fields of a body; an invalid body has none."""
    with suppress(*UNREADABLE):
        return msgspec.json.decode(body, type=_Body)
    return _Body()


def session_key(name: str) -> str:
    """Return a key of fixed length for a session, since clients choose how long names are."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=16).hexdigest()


def _with_tokens(body: bytes, marks: _Landmarks | None) -> bytes:
    """Return a body with its prompt's tokens added, if they are known and change nothing else.

    A replica has read the body as an object with fields, so that it begins with a brace.
    """
    if marks is None or marks.token_ids is None:
        return body
    if b'"prompt_token_ids"' in body or b'"truncate_prompt_tokens"' in body:
        return body
    _, _, fields = body.partition(b"{")
    return b'{"prompt_token_ids":' + msgspec.json.encode(marks.token_ids) + b"," + fields
