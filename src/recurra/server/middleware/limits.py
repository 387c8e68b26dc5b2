"""Refuses new work while the server stops, and bodies that are too large before they are read whole."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recurra.errors import RequestError
from recurra.server.context import context_of
from recurra.server.middleware.auth import OPEN_PATHS
from recurra.server.state import ServerState, shutting_down

#: What of a refused body is still read and thrown away, so that a client that is busy sending gets to
#: read the refusal instead of a broken pipe.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_SECONDS = 2.0


class Draining:
    """ASGI middleware: counts the requests in flight, and lets no new one in once the server stops."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._state.draining:
            response = self._state.report(shutting_down(), context_of(scope)).response()
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
        else:
            self._state.in_flight += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._state.in_flight -= 1


class BodyLimit:
    """ASGI middleware: hands the app the whole body, or answers 413."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._limit = state.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            waits = headers.get(b"expect", b"").lower() == b"100-continue"
            await self._refuse(scope, receive, send, discard=not waits)
            return
        body, complete = await self._read(receive)
        if body is None:
            await self._refuse(scope, receive, send, discard=not complete)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> tuple[bytes | None, bool]:
        """The body, or None as soon as it is too large; and whether nothing more of it comes."""
        chunks: list[bytes] = []
        size = 0
        complete = False
        while not complete and size <= self._limit:
            message = await receive()
            # A client that goes away meanwhile ends the body; the app will see that it is gone.
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
        return (b"".join(chunks) if size <= self._limit else None), complete

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, discard: bool) -> None:
        error = RequestError(
            f"the request body is larger than {self._limit} bytes", status=413, code="body_too_large"
        )
        response = self._state.report(error, context_of(scope)).response()
        response.headers["Connection"] = "close"
        start = {"type": "http.response.start", "status": 413, "headers": response.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if discard:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_discard(receive), _DISCARD_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    seen = 0
    while seen < _DISCARD_BYTES:
        message = await receive()
        seen += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives the body first, then what comes after it."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
