"""Calls to a running engine from asyncio: submit prompts, read what is new, abort what nobody wants."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from recurra.errors import EngineDeadError
from recurra.sampling_params import SamplingParams
from recurra.server.errors import RefusalError
from recurra.server.messages import Abort, Accepted, EngineRequest, Refused, RequestDelta, StepDone, Submit
from recurra.server.metrics import Metrics
from recurra.server.process import EngineHandle


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call, ready for the engine."""

    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class CallDelta:
    """What is new in the ``prompt``-th prompt of a call."""

    prompt: int
    delta: RequestDelta


@dataclass(slots=True)
class _Follow:
    """One request of a call, and what its metrics need."""

    call: Call
    prompt: int
    started: float
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class Call:
    """The prompts of one HTTP call, answered together: an async context manager to iterate over.

    Entering queues all prompts or raises. Leaving, for whatever reason, aborts what is unfinished:
    an exception, a cancelled task and a client that went away all free their slots.
    """

    client: EngineClient
    call_id: int
    request_id: str
    prompts: Sequence[Prompt]
    accepted: asyncio.Future[None]
    open: dict[str, int] = field(default_factory=dict)
    news: list[CallDelta] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None

    async def __aenter__(self) -> Call:
        self.client.submit(self)
        try:
            await self.accepted
        except BaseException:
            self.client.drop(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.drop(self)

    async def __aiter__(self) -> AsyncIterator[list[CallDelta]]:
        """Everything new since the last turn, until all prompts are finished.

        Raises:
            EngineDeadError: the engine process ended.
            RefusalError: the server gave the call up.
        """
        finished = 0
        while finished < len(self.prompts):
            await self.wake.wait()
            self.wake.clear()
            if self.failure is not None:
                raise self.failure
            news, self.news = self.news, []
            finished += sum(item.delta.finished for item in news)
            yield news

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self.failure = error
        self.wake.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # read: a call cancelled meanwhile leaves it unawaited


class EngineClient:
    """Routes between the calls in flight and one engine process.

    Args:
        handle: the running engine.
        metrics: where tokens and latencies are counted.
    """

    def __init__(self, handle: EngineHandle, metrics: Metrics) -> None:
        self._handle = handle
        self._metrics = metrics
        self._serial = itertools.count()
        self._calls: dict[int, Call] = {}
        self._requests: dict[str, _Follow] = {}
        self.dead = False

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def call(self, request_id: str, prompts: Sequence[Prompt]) -> Call:
        """A call to enter with ``async with``."""
        accepted = asyncio.get_running_loop().create_future()
        return Call(self, next(self._serial), request_id, prompts, accepted)

    def submit(self, call: Call) -> None:
        """Send a call's prompts; the engine answers with Accepted or Refused."""
        if self.dead:
            raise EngineDeadError("the engine process ended")
        now = time.monotonic()
        requests = []
        for index, prompt in enumerate(call.prompts):
            # The client's own id alone could be in use by another call.
            engine_id = f"{call.request_id}/{call.call_id}/{index}"
            requests.append(
                EngineRequest(engine_id, prompt.token_ids, prompt.params, prompt.priority, prompt.cache_salt)
            )
            self._requests[engine_id] = _Follow(call, index, now)
            call.open[engine_id] = index
        self._calls[call.call_id] = call
        self._handle.send(Submit(call.call_id, requests))

    def drop(self, call: Call) -> None:
        """Forget a call, and abort in the engine what is not finished."""
        if self._calls.pop(call.call_id, None) is None:
            return
        unfinished = list(call.open)
        for engine_id in unfinished:
            del self._requests[engine_id]
        call.open.clear()
        if unfinished:
            self._metrics.finished.labels("error" if self.dead else "abort").inc(len(unfinished))
            if not self.dead:
                self._handle.send(Abort(unfinished))

    def dispatch(self, event: StepDone | Accepted | Refused) -> None:
        """Hand an engine event to the call that it belongs to."""
        if isinstance(event, StepDone):
            now = time.monotonic()
            for delta in event.deltas:
                self._deliver(delta, now)
        elif (call := self._calls.get(event.call_id)) is not None and not call.accepted.done():
            if isinstance(event, Accepted):
                call.accepted.set_result(None)
                self._metrics.prompt_tokens.inc(sum(len(p.token_ids) for p in call.prompts))
            else:
                self._refuse(call, event)

    def fail_all(self, error: Exception, engine_dead: bool) -> None:
        """End every call in flight with an error."""
        self.dead = self.dead or engine_dead
        for call in list(self._calls.values()):
            call.fail(error)

    def _refuse(self, call: Call, event: Refused) -> None:
        call.open.clear()
        for index in range(len(call.prompts)):
            del self._requests[f"{call.request_id}/{call.call_id}/{index}"]
        error = RefusalError(event.message, event.status, event.code, event.param, event.retry_after)
        call.accepted.set_exception(error)

    def _deliver(self, delta: RequestDelta, now: float) -> None:
        follow = self._requests.get(delta.request_id)
        if follow is None:  # aborted while this was on its way
            return
        self._measure(follow, delta, now)
        if delta.finished:
            del self._requests[delta.request_id]
            del follow.call.open[delta.request_id]
        follow.call.news.append(CallDelta(follow.prompt, delta))
        follow.call.wake.set()

    def _measure(self, follow: _Follow, delta: RequestDelta, now: float) -> None:
        metrics = self._metrics
        tokens = sum(len(answer.token_ids) for answer in delta.answers)
        if tokens:
            metrics.generation_tokens.inc(tokens)
            if follow.last_token is None:
                metrics.time_to_first_token.observe(now - follow.started)
                metrics.cached_tokens.inc(delta.num_cached_tokens)
            else:
                steps = max(len(answer.token_ids) for answer in delta.answers)
                metrics.time_between_tokens.observe((now - follow.last_token) / steps)
            follow.last_token = now
        for answer in delta.answers:
            if answer.finish_reason is not None:
                metrics.finished.labels(answer.finish_reason).inc()
        if delta.finished:
            metrics.request_seconds.observe(now - follow.started)
