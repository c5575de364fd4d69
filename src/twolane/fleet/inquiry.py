"""What a router has to know of a request: read from its body, or asked of a replica."""

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from contextlib import suppress

import aiohttp
import msgspec
from starlette.datastructures import Headers

from twolane.common.checked_json import UNREADABLE
from twolane.common.prefix_digest import Landmarks
from twolane.fleet.calls import ClientCall, forwarded
from twolane.fleet.pool import Member, Pool
from twolane.router.state import RoutedRequest

LANDMARKS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Paths whose prompts replicas can turn into landmarks."""
RESPONSES = "/v1/responses"
GENERATES = (*LANDMARKS, RESPONSES, "/v1/messages")
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
"""An id of a response: the first one in an answer of `RESPONSES`, or in the first event of its
stream, is its own."""
RESPONSE_HEAD = 1024
"""Bytes at the beginning of an answer within which its id stands."""
KNOWN_RESPONSES = 65536
"""Number of responses of which the fleet knows the replica that may have stored them."""
LANDMARK_SECONDS = 1.0
"""Seconds within which a replica must say the landmarks of a prompt; else it counts as new."""
BYTES_PER_TOKEN = 4
"""Bytes of a body for each prompt token where nothing else is known."""
USUAL_OUTPUT, MOST_OUTPUT = 256, 1 << 20
"""Tokens of an answer whose request names none, and the most that the router believes."""
SESSION_HEADER = "x-session-id"


class _Body(msgspec.Struct):
    """What the router reads of a request's body."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None
    model: str | None = None
    previous_response_id: str | None = None

    @property
    def most_output(self) -> int:
        """Tokens that the answer may have, as far as a router believes it."""
        asked = self.max_completion_tokens or self.max_tokens or USUAL_OUTPUT
        return min(max(asked, 1), MOST_OUTPUT)


class _Landmarks(msgspec.Struct):
    """The answer of /fleet/landmarks."""

    prompt_tokens: int
    tokens: list[int]
    hashes: list[int]
    token_ids: list[int] | None = None


class Inquiry:
    """Finds out what the router has to know of requests.

    Args:
        pool: the replicas.
        session: for requests to replicas.
        most_body: bytes that a body may have.
    """

    def __init__(self, pool: Pool, session: aiohttp.ClientSession, most_body: int) -> None:
        self._pool = pool
        self._session = session
        self._most_body = most_body
        self._responses: OrderedDict[str, str] = OrderedDict()
        """Names of the replicas that answered, by the response's id."""

    async def ask(self, call: ClientCall) -> tuple[ClientCall, RoutedRequest]:
        """Return the request with the tokens of its prompt, and what the router needs to know."""
        headers, body = Headers(scope=call.scope), call.body
        known = _known(body)
        call = call._replace(homes=self._homes(call.path, known))
        found = None
        if call.path in LANDMARKS and len(self._pool.serving) > 1:
            found = await self._landmarks(call, LANDMARKS[call.path])
            told = _with_tokens(body, found)
            if len(told) <= self._most_body:  # or the replica would refuse what its client may send
                call = call._replace(body=told)
        asked = headers.get(SESSION_HEADER) or known.user
        return call, RoutedRequest(
            prompt_tokens=found.prompt_tokens if found else max(1, len(body) // BYTES_PER_TOKEN),
            output_tokens=known.most_output,
            landmarks=Landmarks(found.tokens, found.hashes) if found else Landmarks(),
            ttft=_bound(call.path, headers.get("x-slo-ttft-ms", "")),
            session=asked and session_key(asked),
        )

    def note_response(self, call: ClientCall, member: Member, begun: bytes) -> None:
        """Remember which replica may have stored a response, by how its answer begins."""
        if call.path == RESPONSES and (found := RESPONSE_ID.search(begun)):
            self._responses[found[1].decode()] = member.name
            if len(self._responses) > KNOWN_RESPONSES:
                self._responses.popitem(last=False)

    def _homes(self, path: str, known: _Body) -> frozenset[str]:
        """Names of the replicas that have a request's adapter or its earlier response; none: any
        will do, or there is none, as that will say."""
        response = known.previous_response_id
        if path.startswith(f"{RESPONSES}/"):
            response = path.removeprefix(f"{RESPONSES}/").partition("/")[0]
        if (home := self._responses.get(response or "")) is not None:
            return frozenset((home,))
        if known.model not in self._pool.changes.adapters:
            return frozenset()
        serving = self._pool.serving
        return frozenset(each.name for each in serving if known.model in each.adapters)

    async def _landmarks(self, call: ClientCall, kind: str) -> _Landmarks | None:
        """Ask the least busy replica for a prompt's landmarks; None: it does not say."""
        member = min(self._pool.serving, key=lambda each: each.open)
        assert member.place is not None
        try:
            async with (
                asyncio.timeout(LANDMARK_SECONDS),
                self._session.post(
                    f"{member.place.url}/fleet/landmarks/{kind}?token_ids=true",
                    data=call.body,
                    headers=forwarded(call.scope),
                ) as answer,
            ):
                if answer.status != 200:  # the replica that it is sent to says what is wrong
                    return None
                return msgspec.json.decode(await answer.read(), type=_Landmarks)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None


def _bound(path: str, asked: str) -> float | None:
    """Seconds to the first token: as a header asks, or None, the replica's. What generates nothing
    has no bound, and is never refused."""
    if path not in GENERATES:
        return math.inf
    with suppress(ValueError):  # the replica says what is wrong
        if 0.0 < (seconds := float(asked) / 1e3) < math.inf:
            return seconds
    return None


def _known(body: bytes) -> _Body:
    """Read what the router wants to know of a body, which may be anything."""
    with suppress(*UNREADABLE):
        return msgspec.json.decode(body, type=_Body)
    return _Body()


def session_key(name: str) -> str:
    """Return what stands for a session in the router's table: clients choose how long names are."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=16).hexdigest()


def _with_tokens(body: bytes, found: _Landmarks | None) -> bytes:
    """A body, with the tokens of its prompt if they are known and change nothing else.

    A replica has read the body as an object with fields, so that it begins with a brace.
    """
    if found is None or found.token_ids is None:
        return body
    if b'"prompt_token_ids"' in body or b'"truncate_prompt_tokens"' in body:
        return body
    _, _, fields = body.partition(b"{")
    return b'{"prompt_token_ids":' + msgspec.json.encode(found.token_ids) + b"," + fields
