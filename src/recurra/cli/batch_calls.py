"""One line of a batch, answered by the code that answers the same body over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from recurra.cli.batch_lines import Task
from recurra.config.server import ServerConfig
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import RequestError
from recurra.server import chat, completions
from recurra.server.bodies import explain
from recurra.server.client import Call, CallDelta, Prompt
from recurra.server.deltas import DeltaTracker
from recurra.server.messages import EngineInfo
from recurra.server.prompts import chat_ids, check_ids
from recurra.server.protocol.base import Streamed
from recurra.server.protocol.chat import ChatRequest
from recurra.server.protocol.completions import CompletionRequest
from recurra.types import RequestOutput

Writer = completions.CompletionWriter | chat.ChatWriter


@dataclass(frozen=True, slots=True)
class Serving:
    """What a body is checked against."""

    tokenizer: Tokenizer | None
    info: EngineInfo
    names: tuple[str, ...]
    limits: ServerConfig = field(default_factory=ServerConfig)


@dataclass(slots=True)
class BatchCall:
    """A request in the engine; it collects outputs until all its prompts are answered."""

    task: Task
    prompts: list[Prompt]
    writer: Writer
    _deltas: list[CallDelta] = field(default_factory=list)
    _finished: int = 0

    def request_id(self, prompt: int) -> str:
        """The engine's name for one of the prompts."""
        return f"{self.task.line}/{prompt}"

    def add(self, output: RequestOutput) -> bool:
        """Take a finished output; True when the call is complete."""
        tracker = DeltaTracker()
        tracker.start(output.request_id)
        delta = tracker.delta(output)
        assert delta is not None, "a finished output has news"
        self._deltas.append(CallDelta(int(output.request_id.rpartition("/")[2]), delta))
        self._finished += 1
        return self._finished == len(self.prompts)

    async def __aiter__(self) -> AsyncIterator[list[CallDelta]]:
        """All news at once, as the server's own calls give them piece by piece."""
        yield self._deltas

    async def body(self) -> Any:
        """The response body.

        Raises:
            AnswerError: an answer failed.
        """
        return await self.writer.whole(cast(Call, self), self.writer.totals)


async def prepare(task: Task, serving: Serving) -> BatchCall:
    """Check a task and tokenise it.

    Raises:
        RequestError: what is wrong with it.
    """
    if task.url == "/v1/completions":
        return await _completion(task, serving)
    if task.url == "/v1/chat/completions":
        return await _chat(task, serving)
    raise RequestError(
        f"url {task.url!r:.200} is not served; use /v1/completions or /v1/chat/completions", status=404
    )


async def _completion(task: Task, serving: Serving) -> BatchCall:
    body = _validated(CompletionRequest, task.body)
    name = _check(body, serving)
    info, tokenizer = serving.info, serving.tokenizer
    found = await completions.sources(body, tokenizer, info, serving.limits.max_prompts_per_call)
    prompts = completions.engine_prompts(body, found, info, tokenizer is not None)
    writer = completions.CompletionWriter(body, found, tokenizer, f"cmpl-batch-{task.line}", name)
    return BatchCall(task, prompts, writer)


async def _chat(task: Task, serving: Serving) -> BatchCall:
    body = _validated(ChatRequest, task.body)
    name = _check(body, serving)
    ids = await chat_ids(serving.tokenizer, body)
    check_ids(ids, serving.info, "messages")
    prompt = chat.engine_prompt(body, ids, serving.info, serving.limits.default_chat_max_tokens)
    writer = chat.ChatWriter(body, ids, serving.tokenizer, f"chatcmpl-batch-{task.line}", name)
    return BatchCall(task, [prompt], writer)


def _validated(cls: Any, body: Mapping[str, Any]) -> Any:
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        complaints = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise explain(RequestValidationError(complaints, body=body)) from error


def _check(body: Streamed, serving: Serving) -> str:
    """Refuse what no engine is needed for; returns the model's name."""
    body.check_extra(ignore_unknown=serving.limits.unknown_fields == "ignore")
    if body.stream:
        raise RequestError("stream: a batch has nobody to stream to; leave it out", param="stream")
    if body.model is None or body.model in serving.names:
        return body.model or serving.names[0]
    raise RequestError(
        f"the model {body.model!r:.200} does not exist; this run has {', '.join(map(repr, serving.names))} "
        "(--served-model-name gives it other names)",
        param="model",
        status=404,
        code="model_not_found",
    )
