"""What the routes and the middleware share: one object for each app, no globals."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from recurra.config.server import ServerConfig
from recurra.errors import RequestError
from recurra.server.context import RequestContext
from recurra.server.errors import Problem, RefusalError, problem_of
from recurra.server.messages import EngineInfo
from recurra.server.metrics import Metrics
from recurra.server.stored import ResponseStore
from recurra.server.supervisor import Phase, Supervisor

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer

log = logging.getLogger("recurra.server")


@dataclass(slots=True)
class ServerState:
    """One server: its settings, its engine, and whether it is on its way out."""

    config: ServerConfig
    supervisor: Supervisor
    metrics: Metrics
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: int = 0
    responses: ResponseStore = field(default_factory=ResponseStore)

    @property
    def info(self) -> EngineInfo:
        """What the running engine said of itself.

        Raises:
            RefusalError: 503, there is none.
        """
        self.supervisor.client  # noqa: B018 - raises while no engine serves
        info = self.supervisor.info
        assert info is not None, "an engine that serves has told its facts"
        return info

    @property
    def facts(self) -> EngineInfo:
        """What the engine said of itself when it was last ready, also while it restarts.

        Raises:
            RefusalError: 503, the model is still loading.
        """
        return self.supervisor.info or self.info

    @property
    def status(self) -> str:
        """One word for /health: "ok", or why not."""
        if self.draining:
            return "stopping"
        return "ok" if self.supervisor.phase is Phase.READY else self.supervisor.phase.value

    def model_name(self, asked: str | None) -> str:
        """The served name that a request means.

        Raises:
            RequestError: 404, no such model.
        """
        if asked is None or asked in self.names:
            return asked or self.names[0]
        shown = asked if len(asked) <= 200 else asked[:200] + "..."
        raise RequestError(
            f"the model {shown!r} does not exist; this server has {', '.join(map(repr, self.names))}",
            param="model",
            status=404,
            code="model_not_found",
        )

    def report(self, error: Exception, context: RequestContext) -> Problem:
        """Count an error, note it for the log line, and turn it into a reply."""
        problem = problem_of(error)
        self.metrics.errors.labels(problem.kind).inc()
        context.fields["error"] = problem.kind
        if problem.kind == "internal_error":
            fields = {"request_id": context.request_id}
            log.error("a request failed", exc_info=error, extra={"fields": fields})
        return problem


def shutting_down() -> RefusalError:
    """What a stopping server answers."""
    return RefusalError("the server is shutting down", 503, "shutting_down")


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state)]
