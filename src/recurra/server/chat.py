"""Answers ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recurra.errors import RequestError
from recurra.server.answers import TokenNames, Totals, check_answer, collect, finite, pieces
from recurra.server.client import Call, CallDelta, Prompt
from recurra.server.messages import AnswerDelta, EngineInfo, PositionList
from recurra.server.prompts import answer_limit
from recurra.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChatTokenLogprob,
    TokenCandidate,
)
from recurra.server.sse import DONE, event

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer


def engine_prompt(
    body: ChatRequest, token_ids: list[int], info: EngineInfo, default_max_tokens: int | None
) -> Prompt:
    """What the engine is asked to do for a conversation.

    Args:
        default_max_tokens: where neither the request nor the checkpoint limits the answer.

    Raises:
        RequestError: 400, naming the field.
    """
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    if asked is not None and asked < 1:
        raise RequestError(f"{param} must be at least 1, got {asked}", param=param)
    own = info.sampling_defaults.get("max_tokens")
    default = default_max_tokens if own is None else int(own)
    limit = answer_limit(len(token_ids), info, asked, default, param if asked else "messages")
    params = body.sampling_params(
        info.vocab_size, True, info.sampling_defaults, max_tokens=limit, logprobs=body.num_logprobs
    )
    return Prompt(token_ids, params, body.priority or 0, body.cache_salt)


@dataclass(slots=True)
class ChatWriter:
    """Writes the choices of one call, whole or in pieces."""

    body: ChatRequest
    token_ids: list[int]
    tokenizer: Tokenizer | None
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def totals(self) -> Totals:
        """Fresh counters for the call."""
        return Totals(prompt=len(self.token_ids))

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.body.return_tokens_as_token_ids))

    async def whole(self, call: Call, totals: Totals) -> ChatResponse:
        """Wait for all answers and write them."""
        (result,) = await collect(call, totals)
        choices = []
        for answer in sorted(result.answers.values(), key=lambda item: item.index):
            message: AnswerMessage = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append(self._choice(answer) | {"message": message})
        response = self._response("chat.completion", choices)
        response["usage"] = totals.usage()
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.token_ids
        if self.body.prompt_logprobs is not None:
            entries = result.prompt_logprobs or []
            response["prompt_logprobs"] = [self._names.candidates(entry) for entry in entries]
        return response

    async def events(self, call: Call, totals: Totals) -> AsyncIterator[bytes]:
        """The stream: the role, the pieces, the usage if wanted, then the end mark."""
        yield b"".join(self._opening(index) for index in range(self.body.n or 1))
        async for data in pieces(call, lambda item, out: self._write(item, out, totals)):
            yield data
        if self.body.include_usage:
            yield event(self._response("chat.completion.chunk", []) | {"usage": totals.usage()})
        yield DONE

    def _opening(self, index: int) -> bytes:
        choice: ChatChoice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        response = self._chunk(choice, None)
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.token_ids
        return event(response)

    def _write(self, item: CallDelta, out: list[bytes], totals: Totals) -> None:
        totals.add(item.delta)
        for answer in item.delta.answers:
            check_answer(answer)
            # Tokens whose text is held back say nothing yet.
            if (
                answer.text
                or answer.finish_reason is not None
                or answer.logprobs
                or self.body.return_token_ids
            ):
                content: AnswerMessage = {"content": answer.text} if answer.text else {}
                out.append(event(self._chunk(self._choice(answer) | {"delta": content}, totals)))

    def _chunk(self, choice: ChatChoice, totals: Totals | None) -> ChatResponse:
        response = self._response("chat.completion.chunk", [choice])
        if self.body.include_usage:
            counted = totals is not None and self.body.continuous_usage
            response["usage"] = totals.usage() if totals is not None and counted else None
        return response

    def _response(self, kind: Any, choices: list[ChatChoice]) -> ChatResponse:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, answer: AnswerDelta) -> ChatChoice:
        choice: ChatChoice = {
            "index": answer.index,
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _logprobs(self, answer: AnswerDelta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        pairs = zip(answer.token_ids, answer.logprobs or [], strict=True)
        return {"content": [self._token(token_id, entry) for token_id, entry in pairs]}

    def _token(self, token_id: int, entry: PositionList) -> ChatTokenLogprob:
        own = next((c.logprob for c in entry if c.token_id == token_id), float("-inf"))
        limit = self.body.top_logprobs or 0
        top = sorted((c for c in entry if c.rank <= limit), key=lambda c: c.rank)
        return {
            **self._candidate(token_id, own),
            "top_logprobs": [self._candidate(c.token_id, c.logprob) for c in top],
        }

    def _candidate(self, token_id: int, logprob: float) -> TokenCandidate:
        names = self._names
        return {"token": names.name(token_id), "logprob": finite(logprob), "bytes": names.bytes(token_id)}
