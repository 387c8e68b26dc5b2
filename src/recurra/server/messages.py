"""What crosses between the server and its engine process: MessagePack structs, one union each way.

Answers travel as differences. The engine reports texts so far; sending those would cost the square
of an answer's length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from recurra.sampling_params import SamplingParams


class TokenLogprob(NamedTuple):
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int


#: The candidates at one position, as the engine ordered them.
PositionList = list[TokenLogprob]


class Struct(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# --- to the engine --------------------------------------------------------------------------------


class EngineRequest(Struct):
    """One prompt for the engine; ``params.n`` answers come back."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Submit(Struct):
    """The prompts of one HTTP call: all are queued, or none."""

    call_id: int
    requests: list[EngineRequest]


class Abort(Struct):
    """Forget these requests and free what they hold."""

    request_ids: list[str]


class Stop(Struct):
    """End the process; what is in flight is dropped."""


# --- from the engine ------------------------------------------------------------------------------


class AnswerDelta(Struct):
    """What is new in one of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionList] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class RequestDelta(Struct):
    """What is new in a request. Prompt log-probabilities come once."""

    request_id: str
    answers: list[AnswerDelta]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionList | None] | None = None


class StepDone(Struct):
    """Everything new after one engine step, in one message."""

    deltas: list[RequestDelta]


class Accepted(Struct):
    """A submitted call waits in the engine's queue."""

    call_id: int


class Refused(Struct):
    """A submitted call can't be served; none of its requests was queued."""

    call_id: int
    message: str
    param: str | None
    status: int
    code: str | None
    retry_after: int | None = None


class Progress(Struct):
    """How far start-up is."""

    stage: str
    done: int
    total: int


class EngineInfo(Struct):
    """What the server must know of the engine once it is warm."""

    vocab_size: int
    max_model_len: int
    max_queue_len: int | None
    architecture: str
    #: Fields of SamplingParams that the checkpoint sets for requests that don't.
    sampling_defaults: dict[str, float | int] = {}


class Stats(Struct):
    """The engine's gauges and running totals since its process started."""

    values: dict[str, float]


class StartupFailed(Struct):
    """The engine couldn't start.

    Attributes:
        message: why.
        settled: it would fail again on every try: a setting or a checkpoint that can't work.
        setting: (name, value, problem, hint) where a setting is at fault.
    """

    message: str
    settled: bool
    setting: tuple[str, str | int | float | bool | None, str, str] | None = None


Command = Submit | Abort | Stop
Event = StepDone | Accepted | Refused | Progress | EngineInfo | Stats | StartupFailed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """Any message as bytes."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """The server's message, in the engine process."""
    command: Any = _commands.decode(data)
    return command  # type: ignore[no-any-return]


def decode_event(data: bytes) -> Event:
    """The engine's message, in the server process."""
    event: Any = _events.decode(data)
    return event  # type: ignore[no-any-return]
