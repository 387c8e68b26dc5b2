"""The engine's side of the process boundary: take commands, step, send what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from recurra.errors import QueueFullError, RequestError
from recurra.sampling_params import SamplingParams
from recurra.server.deltas import DeltaTracker
from recurra.server.messages import (
    Abort,
    Accepted,
    Command,
    Event,
    Refused,
    Stats,
    StepDone,
    Stop,
    Submit,
)
from recurra.types import RequestOutput

log = logging.getLogger("recurra.server.engine")

#: Seconds between two pushes of statistics while the engine is busy.
STATS_INTERVAL = 0.25


class Engine(Protocol):
    """What the loop needs of ``recurra.engine.engine.LLMEngine``."""

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0) -> Any:
        """Queue a request; raises RequestError."""
        ...

    def abort_request(self, request_ids: Any) -> Any:
        """Forget requests; unknown ids are ignored."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def step(self) -> list[RequestOutput]:
        """Advance every running request."""
        ...

    def stats(self) -> Any:
        """A dataclass of numbers."""
        ...


class Channel(Protocol):
    """The engine's end of the pipe to the server."""

    def receive(self, block: bool) -> Iterable[Command]:
        """Commands that have arrived; waits for one if ``block``."""
        ...

    def send(self, event: Event) -> None:
        """Send without waiting."""
        ...


@dataclass(slots=True)
class EngineLoop:
    """Runs one engine until a Stop command.

    An exception of one request is that request's refusal. An exception in a step leaves states nobody
    can trust, so it leaves ``run`` and ends the process.
    """

    engine: Engine
    channel: Channel
    numbers: Callable[[Any], dict[str, float]]
    _tracker: DeltaTracker = field(default_factory=DeltaTracker)
    _stats_sent: dict[str, float] = field(default_factory=dict)
    _stats_time: float = 0.0

    def run(self) -> None:
        """Serve until told to stop: blocks while idle, never waits while busy."""
        while True:
            idle = not self.engine.has_unfinished_requests()
            if idle:
                self._push_stats()
            for command in self.channel.receive(block=idle):
                if isinstance(command, Stop):
                    return
                self._obey(command)
            if self.engine.has_unfinished_requests():
                self._step()

    def _obey(self, command: Submit | Abort) -> None:
        if isinstance(command, Submit):
            self.channel.send(self._submit(command))
            return
        for request_id in command.request_ids:
            self._tracker.forget(request_id)
        self.engine.abort_request(command.request_ids)

    def _submit(self, call: Submit) -> Event:
        queued: list[str] = []
        try:
            for request in call.requests:
                prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
                if request.cache_salt is not None:
                    prompt["cache_salt"] = request.cache_salt
                self.engine.add_request(request.request_id, prompt, request.params, request.priority)
                queued.append(request.request_id)
        except RequestError as error:
            self.engine.abort_request(queued)
            retry_after = error.retry_after if isinstance(error, QueueFullError) else None
            return Refused(call.call_id, str(error), error.param, error.status, error.code, retry_after)
        except Exception as error:
            log.exception("a request could not be queued")
            self.engine.abort_request(queued)
            return Refused(
                call.call_id, f"internal error: {type(error).__name__}", None, 500, "internal_error"
            )
        for request_id in queued:
            self._tracker.start(request_id)
        return Accepted(call.call_id)

    def _step(self) -> None:
        deltas = [d for output in self.engine.step() if (d := self._tracker.delta(output)) is not None]
        if deltas:
            self.channel.send(StepDone(deltas))
        if time.monotonic() - self._stats_time >= STATS_INTERVAL:
            self._push_stats()

    def _push_stats(self) -> None:
        self._stats_time = time.monotonic()
        values = self.numbers(self.engine.stats())
        if values != self._stats_sent:
            self._stats_sent = values
            self.channel.send(Stats(values))
