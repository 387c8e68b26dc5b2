"""API keys: every path needs one, but for those that machines ask."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from recurra.errors import RequestError
from recurra.server.context import context_of
from recurra.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Auth:
    """ASGI middleware.

    Keys are compared as digests, all of them, each in constant time: how long a refusal takes tells
    nothing about the keys.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [_digest(key.get_secret_value().encode()) for key in state.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "no valid API key; send the header 'Authorization: Bearer <key>'",
            status=401,
            code="invalid_api_key",
        )
        response = self._state.report(error, context_of(scope)).response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        header = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        kind, _, key = header.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)
