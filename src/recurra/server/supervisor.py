"""Keeps an engine running: starts it, watches it, and starts it again with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from recurra.errors import CheckpointError, ConfigError, EngineDeadError, RecurraError
from recurra.server.client import EngineClient
from recurra.server.errors import RefusalError
from recurra.server.messages import EngineInfo, Event, Progress, StartupFailed, Stats
from recurra.server.metrics import Metrics
from recurra.server.process import EngineHandle, Launcher

log = logging.getLogger("recurra.server")

#: An engine that served this many seconds starts again without the pauses of earlier failures.
HEALTHY_SECONDS = 60.0
#: Seconds an idle engine gets to end by itself.
STOP_GRACE = 5.0


class Phase(Enum):
    """What the engine is doing."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds before the first restart, the most of it (it doubles), failures before giving up."""

    backoff: float = 1.0
    backoff_max: float = 30.0
    limit: int = 5

    def pause(self, failures: int) -> float:
        """Seconds to wait before the next try, after ``failures`` in a row (1 or more)."""
        return float(min(self.backoff_max, self.backoff * 2.0 ** (failures - 1)))


@dataclass(slots=True)
class Supervisor:
    """Owns the engine's life.

    ``failure`` is set once it gives up: a setting or a checkpoint that can't work (no restart would
    mend that), a failed first start, or too many failed restarts; ``gave_up`` is called then.
    """

    launch: Launcher
    metrics: Metrics
    policy: RestartPolicy
    gave_up: Callable[[], None] = lambda: None
    phase: Phase = Phase.STARTING
    progress: Progress | None = None
    info: EngineInfo | None = None
    failure: RecurraError | None = None
    _client: EngineClient | None = None
    _handle: EngineHandle | None = None
    _task: asyncio.Task[None] | None = None
    _failures: int = 0

    def start(self) -> None:
        """Launch the engine; returns at once."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def client(self) -> EngineClient:
        """The client of the running engine.

        Raises:
            RefusalError: 503, there is none.
        """
        if self._client is None or self.phase is not Phase.READY:
            self._refuse()
        return self._client

    @property
    def num_calls(self) -> int:
        """Calls in flight."""
        return self._client.num_calls if self._client is not None else 0

    @property
    def handle(self) -> EngineHandle | None:
        """The engine that runs or starts."""
        return self._handle

    def abort_calls(self, error: Exception) -> None:
        """End every call in flight with ``error``."""
        if self._client is not None:
            self._client.fail_all(error, engine_dead=False)

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """End the engine; calls still in flight fail."""
        self.phase = Phase.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose_client()
        if self._handle is not None:
            await self._handle.stop(grace)
            self._handle = None

    def _refuse(self) -> NoReturn:
        if self.phase is Phase.RESTARTING:
            raise RefusalError("the engine process ended; it is being restarted", 503, "engine_dead", None, 5)
        raise RefusalError("the model is still loading", 503, "engine_starting", None, 5)

    async def _run(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:
            log.exception("the engine can't be kept running")
            self.failure = EngineDeadError(f"the engine can't be kept running: {error!r}")
        self._lose_client()
        self.phase = Phase.STOPPED
        self.gave_up()

    async def _keep_alive(self) -> None:
        while self.failure is None:
            started = time.monotonic()
            handle = self._handle = self.launch()
            code = await self._life(handle)
            await handle.stop(0)
            self._handle = None
            served = self.phase is Phase.READY
            self._lose_client()
            if self.failure is None:
                await self._prepare_restart(code, served, time.monotonic() - started)

    async def _life(self, handle: EngineHandle) -> int:
        """One engine from start to end; returns its exit code."""
        pump = asyncio.create_task(self._pump(handle))
        try:
            code = await handle.wait()
            # Its last words may still be on their way: why it could not start, or finished answers.
            await asyncio.wait({pump}, timeout=0.2)
            return code
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self, handle: EngineHandle) -> None:
        while True:
            event = await handle.receive()
            try:
                self._take(event, handle)
            except Exception:
                log.exception("an event of the engine could not be handled")

    def _take(self, event: Event, handle: EngineHandle) -> None:
        if isinstance(event, Stats):
            self.metrics.take(event.values)
        elif isinstance(event, Progress):
            self._report(event)
        elif isinstance(event, EngineInfo):
            self._ready(event, handle)
        elif isinstance(event, StartupFailed):
            self._failed(event)
        elif self._client is not None:
            self._client.dispatch(event)

    def _ready(self, info: EngineInfo, handle: EngineHandle) -> None:
        self.info = info
        self._client = EngineClient(handle, self.metrics)
        self.phase = Phase.READY
        self.progress = None
        self.metrics.engine_up.set(1)
        fields = {"architecture": info.architecture, "max_model_len": info.max_model_len}
        log.info("the engine is ready", extra={"fields": fields})

    def _failed(self, event: StartupFailed) -> None:
        if event.settled:
            self.failure = _settled_error(event)
        elif self.phase is Phase.STARTING:
            self.failure = EngineDeadError(f"the engine could not start: {event.message}")
        else:
            log.error("the engine could not start: %s", event.message)

    def _report(self, progress: Progress) -> None:
        """Log a stage's begin, its end, and each tenth between."""
        last = self.progress
        self.progress = progress
        tenth = 10 * progress.done // max(1, progress.total)
        if (
            last is not None
            and last.stage == progress.stage
            and tenth == 10 * last.done // max(1, last.total)
        ):
            return
        fields = {"stage": progress.stage, "done": progress.done, "total": progress.total}
        log.info("starting", extra={"fields": fields})

    def _lose_client(self) -> None:
        if self._client is not None:
            self._client.fail_all(EngineDeadError("the engine process ended"), engine_dead=True)
            self._client = None
        self.metrics.engine_gone()

    async def _prepare_restart(self, code: int, served: bool, seconds: float) -> None:
        if self.phase is Phase.STARTING:  # it died without a word, e.g. killed for memory
            message = f"the engine process ended while starting, with exit code {code}"
            self.failure = EngineDeadError(message)
            return
        self.phase = Phase.RESTARTING
        self._failures = 1 if served and seconds >= HEALTHY_SECONDS else self._failures + 1
        if self._failures > self.policy.limit:
            message = f"the engine process ended {self._failures} times in a row; the log says why"
            self.failure = EngineDeadError(message)
            return
        pause = self.policy.pause(self._failures)
        fields = {"exit_code": code, "restart_in_s": pause, "failures": self._failures}
        log.error("the engine process ended and will be restarted", extra={"fields": fields})
        await asyncio.sleep(pause)
        self.metrics.engine_restarts.inc()


def _settled_error(event: StartupFailed) -> RecurraError:
    """The engine's own error, in this process."""
    if event.setting is None:
        return CheckpointError(event.message)
    name, value, problem, hint = event.setting
    return ConfigError(name, value, problem, hint)
