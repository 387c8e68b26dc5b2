"""Server-sent events, and requests that end when their client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from recurra.server.errors import Problem

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def event(data: Any) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Do ``work``, but cancel it as soon as the client is gone.

    Raises:
        ClientGoneError: it is.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of events.

    The status is sent with the generator's first item (which may be empty): what fails before that is
    an ordinary error reply. What fails later becomes an event with the error object, and no end mark
    follows it. A client that goes away closes the generator at once.

    Args:
        events: yields encoded events.
        on_error: turns an exception into the problem to report.
        on_gone: told when the client went away.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[Exception], Problem],
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_error = on_error
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._stream(scope, receive, send), receive)
        except ClientGoneError:
            self._on_gone()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await self._on_error(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _body(send, first)
            try:
                async for data in events:
                    await _body(send, data)
            except Exception as error:
                await _body(send, event(self._on_error(error).body()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(send: Send, data: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": data, "more_body": True})
