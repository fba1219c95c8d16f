"""What happens around every route: request ids and API keys."""

import hashlib
import hmac
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serving.refusals import error_body

REQUEST_ID = "x-request-id"
LONGEST_ID = 128
OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/load", "/openapi.json"})
"""Paths that need no key, because orchestrators and monitors request them."""


class RequestIds:
    """Gives every answer the id that its request came with, or a new one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        id = _usable(Headers(scope=scope).get(REQUEST_ID)) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = id
            await send(message)

        await self.app(scope, receive, send_with_id)


def _usable(id: str | None) -> str | None:
    """The id if it is safe in a header and in a line of a log; otherwise None."""
    if id is None or not 0 < len(id) <= LONGEST_ID or not id.isascii() or not id.isprintable():
        return None
    return id


class Keys:
    """Refuses requests without one of the keys. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self._hashes = [_hash(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._has_key(scope):
            return await self.app(scope, receive, send)
        message = "no valid key; expected the header 'Authorization: Bearer KEY'"
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": error_body(401, message)})

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS

    def _has_key(self, scope: Scope) -> bool:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _hash(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        return kind.lower() == "bearer" and any(matches)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
