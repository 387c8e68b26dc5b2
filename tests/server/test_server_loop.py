"""The engine's side of the boundary, without sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
from fake_engine import AccidentError, FakeConfig, FakeEngine

from recurra.sampling_params import SamplingParams
from recurra.server.deltas import DeltaTracker
from recurra.server.loop import EngineLoop
from recurra.server.messages import (
    Abort,
    Accepted,
    Command,
    EngineRequest,
    Event,
    Refused,
    Stats,
    StepDone,
    Stop,
    Submit,
    decode_command,
    decode_event,
    encode,
)
from recurra.server.worker import numbers
from recurra.types import CompletionOutput, Logprob, RequestOutput


class ScriptedChannel:
    """Gives prepared commands, and remembers how it was asked."""

    def __init__(self, *commands: Command) -> None:
        self.commands = [decode_command(encode(command)) for command in commands]
        self.sent: list[Event] = []
        self.asked: list[bool] = []

    def receive(self, block: bool) -> Iterable[Command]:
        self.asked.append(block)
        if block and not self.commands:
            yield Stop()
        if self.commands:
            yield self.commands.pop(0)

    def send(self, event: Event) -> None:
        self.sent.append(decode_event(encode(event)))

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.sent if isinstance(event, kind)]


def request(name: str, n: int = 1, **params: Any) -> EngineRequest:
    return EngineRequest(name, [1, 2, 3], SamplingParams(**{"max_tokens": 5, "n": n} | params))


def run(*commands: Command, **engine: Any) -> ScriptedChannel:
    channel = ScriptedChannel(*commands)
    EngineLoop(FakeEngine(FakeConfig(**engine)), channel, numbers).run()
    return channel


def test_one_message_a_step_holds_every_request() -> None:
    channel = run(Submit(1, [request("a"), request("b", n=2)]))
    steps = channel.of(StepDone)
    assert len(steps) == 5
    for step in steps:
        assert [delta.request_id for delta in step.deltas] == ["a", "b"]
        assert [len(answer.token_ids) for delta in step.deltas for answer in delta.answers] == [1, 1, 1]
    assert [delta.finished for delta in steps[-1].deltas] == [True, True]
    assert channel.of(Accepted) == [Accepted(1)]


def test_idle_blocks_and_busy_never_waits() -> None:
    channel = run(Submit(1, [request("a")]))
    assert channel.asked == [True, *[False] * 4, True]


def test_an_aborted_request_is_heard_of_no_more() -> None:
    channel = run(Submit(1, [request("a"), request("b")]), Abort(["a"]))
    told = [delta.request_id for step in channel.of(StepDone) for delta in step.deltas]
    assert told.count("a") == 1
    assert told.count("b") == 5
    assert channel.of(Stats)[-1].values["used_slots"] == 0


def test_a_refused_call_leaves_nothing_in_the_queue() -> None:
    calls = (
        Submit(1, [request(str(i), max_tokens=60) for i in range(3)]),
        Submit(2, [request("ok", max_tokens=60)]),
    )
    channel = run(*calls, max_queue_len=2, step_seconds=0.01)
    (refused,) = channel.of(Refused)
    assert (refused.call_id, refused.status, refused.retry_after) == (1, 429, 1)
    assert channel.of(Accepted) == [Accepted(2)]
    assert {d.request_id for s in channel.of(StepDone) for d in s.deltas} == {"ok"}
    loads = [event.values["running"] + event.values["waiting"] for event in channel.of(Stats)]
    assert max(loads) <= 1


def test_an_error_of_a_request_is_told_with_its_field() -> None:
    bad = EngineRequest("a", [999], SamplingParams())
    (refused,) = run(Submit(4, [bad])).of(Refused)
    assert (refused.call_id, refused.status, refused.param) == (4, 400, "prompt_token_ids")


def test_an_exception_in_a_step_is_fatal() -> None:
    engine = FakeEngine(FakeConfig())
    crash = EngineRequest("a", engine.tokenizer.encode("!crash"), SamplingParams())
    with pytest.raises(AccidentError):
        EngineLoop(engine, ScriptedChannel(Submit(1, [crash])), numbers).run()


def test_statistics_are_pushed_when_they_change() -> None:
    values = [event.values for event in run(Submit(1, [request("a")])).of(Stats)]
    assert values[0] == {"running": 0, "waiting": 0, "free_slots": 4, "used_slots": 0}
    assert values[-1] == values[0]
    assert all(a != b for a, b in itertools.pairwise(values))


def test_numbers_leaves_out_what_is_none() -> None:
    stats = FakeEngine(FakeConfig()).stats()
    assert set(numbers(stats)) == set(asdict(stats)) - {"finished"}


def output(tokens: int, text: str, **more: Any) -> RequestOutput:
    logprobs = [{i: Logprob(-float(i), 1)} for i in range(tokens)]
    answer = CompletionOutput(0, text, list(range(tokens)), logprobs=logprobs, **more)
    done = answer.finish_reason is not None
    return RequestOutput("a", None, [7], [None], [answer], done, num_cached_tokens=3)


def test_deltas_add_up_and_prompt_logprobs_come_once() -> None:
    tracker = DeltaTracker()
    tracker.start("a")
    first = tracker.delta(output(2, "he"))
    assert first is not None
    assert first.prompt_logprobs == [None]
    assert tracker.delta(output(2, "he")) is None
    third = tracker.delta(output(4, "hello"))
    assert third is not None
    assert third.prompt_logprobs is None
    last = tracker.delta(output(4, "hello", finish_reason="stop", stop_reason="x"))
    assert last is not None
    answers = [a for delta in (first, third, last) for a in delta.answers]
    assert "".join(a.text for a in answers) == "hello"
    assert [t for a in answers for t in a.token_ids] == [0, 1, 2, 3]
    assert [c.token_id for a in answers for p in a.logprobs or [] for c in p] == [0, 1, 2, 3]
    assert (last.finished, answers[-1].finish_reason, answers[-1].stop_reason) == (True, "stop", "x")
    assert tracker.delta(output(4, "hello", finish_reason="stop")) is None


def test_unknown_requests_have_no_deltas() -> None:
    tracker = DeltaTracker()
    assert tracker.delta(output(1, "x")) is None
    tracker.start("a")
    tracker.forget("a")
    assert tracker.delta(output(1, "x")) is None


def test_bytes_sent_grow_with_the_answer_not_with_its_square() -> None:
    def sent(tokens: int) -> int:
        channel = run(Submit(1, [request("a", max_tokens=tokens)]), max_model_len=2000)
        return sum(len(encode(event)) for event in channel.of(StepDone))

    assert sent(800) < 4.5 * sent(200)


def test_a_step_of_many_requests_is_cheap_to_tell() -> None:
    """Host time a step spends on 64 answers at the boundary stays far below a model's step."""
    tracker = DeltaTracker()
    outputs = []
    for i in range(64):
        answer = CompletionOutput(0, "x" * 500, list(range(500)))
        outputs.append(RequestOutput(str(i), None, [1], None, [answer], False))
        tracker.start(str(i))
    for each in outputs:
        tracker.delta(each)
    best = min(_step_seconds(tracker, outputs) for _ in range(5))
    assert best < 0.005


def _step_seconds(tracker: DeltaTracker, outputs: list[RequestOutput]) -> float:
    for each in outputs:
        each.outputs[0].token_ids.append(1)
        each.outputs[0].text += "y"
    started = time.perf_counter()
    encode(StepDone([d for each in outputs if (d := tracker.delta(each)) is not None]))
    return time.perf_counter() - started
