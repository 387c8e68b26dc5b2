"""Puts the server together: routes, error replies, middleware, and the engine's life."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from recurra import __version__
from recurra.errors import EngineDeadError, RequestError
from recurra.server.bodies import explain
from recurra.server.context import context_of
from recurra.server.middleware.access import Access
from recurra.server.middleware.auth import Auth
from recurra.server.middleware.limits import BodyLimit, Draining
from recurra.server.response_routes import router as response_router
from recurra.server.routes import router
from recurra.server.sse import ClientGoneError
from recurra.server.state import ServerState

#: nginx's status for it; nobody reads the reply.
_CLIENT_GONE = 499


def create_app(state: ServerState) -> FastAPI:
    """The ASGI app; its lifespan starts and stops the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.supervisor.start()
        try:
            yield
        finally:
            await state.supervisor.stop()
            state.responses.close()

    app = FastAPI(title="Recurra", version=__version__, lifespan=lifespan, strict_content_type=False)
    app.state.server = state
    app.include_router(router)
    app.include_router(response_router)
    _add_error_replies(app, state)
    _add_middleware(app, state)
    return app


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Innermost first: the last one added sees a request first."""
    app.add_middleware(BodyLimit, state=state)
    app.add_middleware(Draining, state=state)
    app.add_middleware(Auth, state=state)
    if state.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Access, state=state)


def _add_error_replies(app: FastAPI, state: ServerState) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        return state.report(error, context_of(request.scope)).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_error(request, explain(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = await on_error(request, _http_error(request, error))
        response.headers.update(error.headers or {})
        return response

    async def on_gone(request: Request, error: Exception) -> Response:
        context_of(request.scope).fields["client_gone"] = True
        return Response(status_code=_CLIENT_GONE)

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(EngineDeadError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGoneError, on_gone)


def _http_error(request: Request, error: HTTPException) -> RequestError:
    where = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 404:
        return RequestError(f"there is no {where}", status=404, code="not_found")
    if error.status_code == 405:
        return RequestError(f"{where} is not allowed", status=405, code="method_not_allowed")
    return RequestError(str(error.detail), status=error.status_code, code="invalid_request")
