"""Outermost: gives each request its id, counts it, logs one line, and answers 500 for what nobody foresaw."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recurra.server.context import RequestContext, new_context
from recurra.server.state import ServerState

log = logging.getLogger("recurra.server.access")

#: Asked every few seconds by machines: logged at debug level.
_QUIET = ("/health", "/metrics")


class Access:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = new_context(scope)
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = context.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            problem = self._state.report(error, context)
            if status:  # too late for another status: leave the reply incomplete
                raise
            await problem.response()(scope, receive, send_with_id)
        finally:
            self._record(scope, context, status, time.monotonic() - started)

    def _record(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._state.metrics.http.labels(route, str(status)).inc()
        fields: dict[str, Any] = {
            "request_id": context.request_id,
            "client": (scope.get("client") or ("-",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **context.fields,
        }
        log.log(
            logging.DEBUG if scope["path"] in _QUIET else logging.INFO, "request", extra={"fields": fields}
        )
