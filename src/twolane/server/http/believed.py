"""What of a request is believed: the host that it names, and the spelling of its path."""

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from twolane.server.http.errors import ApiError

LOCAL_ZONES = ("localhost", "local", "internal", "home.arpa", "svc")
"""Last parts of host names that nobody can register, so that no web page has such a name (RFC 6761,
6762 and 8375; ICANN's .internal; services of Kubernetes)."""
LOCAL_NAME = re.compile(rf"[a-z0-9_-]+|[a-z0-9_.-]+\.({'|'.join(map(re.escape, LOCAL_ZONES))})")
NAMED = (b"/v1/models/", b"/v1/responses/")
"""Paths whose rest is a name, which may contain slashes, also encoded ones."""
ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")
UNRESERVED = re.compile(rb"[A-Za-z0-9._~-]")
"""Characters that mean the same whether they are encoded or not (RFC 3986, section 2.3)."""
API_ROOT = re.compile(rb"^/v1//+")


class HostCheck:
    """Refuses requests for hosts that are not this server, as a web page sends them whose own name
    was bound to this server's address (DNS rebinding).

    Addresses are allowed, and so is a name of one part or of a local zone: no page has such a name.

    Args:
        allowed: further hosts; "*" allows all, and "*.example.com" all below a name.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        names = [name.lower().rstrip(".") for name in allowed]
        self._all = "*" in names
        self._names = frozenset(name for name in names if not name.startswith("*"))
        self._below = tuple(name[1:] for name in names if name.startswith("*."))

    def check(self, headers: Headers) -> None:
        """Refuse a request whose Host is not allowed; one without a Host comes from no browser.

        Raises:
            ApiError: 403.
        """
        host = headers.get("host")
        if host and not (self._all or self._allows(host_name(host))):
            message = f"no host {host[:200]!r} is served here: --allowed-hosts names further hosts"
            raise ApiError(403, message, code="host_not_allowed")

    def _allows(self, name: str) -> bool:
        if name in self._names or name.endswith(self._below):
            return True
        return LOCAL_NAME.fullmatch(name) is not None or is_address(name)


def host_name(host: str) -> str:
    """Return the lower-case name or address in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def is_address(name: str) -> bool:
    """Return whether a host's name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_path(scope: Scope) -> None:
    """Send a request for another spelling of a path to the path as it is served: a proxy that
    closes a path knows that one alone.

    Clients double slashes where they join addresses, and encode letters.

    Raises:
        ApiError: 308, with the path in `Location`.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    plain = plain_path(raw)
    if plain != raw and raw.startswith((b"/", b"%2f", b"%2F")):
        path, query = plain.decode("ascii", "replace"), scope["query_string"].decode("latin-1")
        location = f"{path}?{query}" if query else path
        message = f"the path is written {path[:200]} here"
        raise ApiError(308, message, code="path_spelling", headers={"Location": location})


def plain_path(raw: bytes) -> bytes:
    """Return the one spelling of a path that is served: slashes single at its beginning and after
    the API's root, none at its end, and nothing encoded that need not be."""
    path = ESCAPED.sub(_decoded, raw).replace(b"\\", b"%5C")  # a browser takes it for a slash
    if not path.startswith(NAMED):
        path = path.replace(b"%2F", b"/").replace(b"%2f", b"/")
    return API_ROOT.sub(b"/v1/", b"/" + path.strip(b"/"), count=1)


def _decoded(escape: re.Match[bytes]) -> bytes:
    character = bytes([int(escape[1], 16)])
    return character if UNRESERVED.fullmatch(character) else escape[0]
