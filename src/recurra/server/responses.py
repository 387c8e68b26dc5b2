"""Answers ``/v1/responses``: a turn that goes on from a stored one, token for token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recurra.errors import RequestError
from recurra.server.answers import Totals, check_answer, collect, pieces
from recurra.server.client import Call, CallDelta, Prompt
from recurra.server.messages import AnswerDelta, EngineInfo
from recurra.server.prompts import answer_limit
from recurra.server.protocol.responses import ResponseRequest
from recurra.server.sse import event
from recurra.server.stored import Stored

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation to answer.

    Attributes:
        messages: all turns without the instructions.
        prompt: the rendered conversation.
        token_ids: its tokens; where it goes on from a stored response, these begin with that one's very tokens.
    """

    messages: list[dict[str, Any]]
    prompt: str
    token_ids: list[int]


def make_turn(body: ResponseRequest, before: Stored | None, tokenizer: Tokenizer) -> Turn:
    """Render a conversation.

    Raises:
        RequestError: the template refuses it.
    """
    messages = [*(before.messages if before else ()), *body.new_messages()]
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    prompt = tokenizer.render_chat([*opening, *messages], add_generation_prompt=True)
    ids = None if before is None else _continued(before, prompt, tokenizer)
    return Turn(messages, prompt, ids or tokenizer.encode(prompt, add_special_tokens=False))


def _continued(before: Stored, prompt: str, tokenizer: Tokenizer) -> list[int] | None:
    """The stored tokens and those of what follows; None: the conversation doesn't begin with that text.

    Tokens that a model chose aren't always those that a tokenizer makes of their text, and a state is of tokens.
    """
    said = before.prompt + before.answer
    if not prompt.startswith(said):
        return None
    ids, rest = list(before.token_ids), prompt[len(said) :]
    if ids[-1] in tokenizer.eos_token_ids:
        ids.pop()  # the template writes it, or leaves it out
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    if not shown.endswith(
        before.answer
    ):  # a stop string was cut off: its tokens were computed and aren't said
        return None
    return ids + (tokenizer.encode(rest, add_special_tokens=False) if rest else [])


def engine_prompt(
    body: ResponseRequest, turn: Turn, info: EngineInfo, default_max_tokens: int | None
) -> Prompt:
    """What the engine is asked to do.

    Raises:
        RequestError: 400, naming the field.
    """
    asked = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    if asked is not None and asked < 1:
        raise RequestError(f"max_output_tokens must be at least 1, got {asked}", param="max_output_tokens")
    own = info.sampling_defaults.get("max_tokens")
    default = default_max_tokens if own is None else int(own)
    limit = answer_limit(len(turn.token_ids), info, asked, default, "input")
    params = body.sampling_params(info.vocab_size, True, info.sampling_defaults, max_tokens=limit)
    return Prompt(turn.token_ids, params, body.priority or 0, body.cache_salt)


def owner_of(authorization: str | None) -> str:
    """A name for whoever shows an API key, from which the key can't be told."""
    key = (authorization or "").partition(" ")[2].strip()
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


@dataclass(slots=True)
class ResponseWriter:
    """Writes one response, whole or in pieces, and has it kept."""

    body: ResponseRequest
    turn: Turn
    response_id: str
    model: str
    keep: Callable[[Stored], None]
    created: int = field(default_factory=lambda: int(time.time()))
    _events: int = 0

    @property
    def totals(self) -> Totals:
        """Fresh counters for the call."""
        return Totals(prompt=len(self.turn.token_ids))

    async def whole(self, call: Call, totals: Totals) -> dict[str, Any]:
        """Wait for the answer and write it."""
        (result,) = await collect(call, totals)
        return self._finish(result.answers[0], totals)

    async def events(self, call: Call, totals: Totals) -> AsyncIterator[bytes]:
        """The stream, as OpenAI's client expects it."""
        texts: list[str] = []
        ids: list[int] = []
        last: list[AnswerDelta] = []

        def write(item: CallDelta, out: list[bytes]) -> None:
            totals.add(item.delta)
            for answer in item.delta.answers:
                check_answer(answer)
                ids.extend(answer.token_ids)
                if answer.text:
                    texts.append(answer.text)
                    out.append(
                        self._event("output_text.delta", self._place | {"delta": answer.text, "logprobs": []})
                    )
                if answer.finish_reason is not None:
                    last.append(answer)

        opening = self._response("in_progress", None, None, None)
        yield self._event("created", {"response": opening}) + self._event(
            "in_progress", {"response": opening}
        )
        yield self._event("output_item.added", {"output_index": 0, "item": self._item("in_progress", None)})
        yield self._event("content_part.added", self._place | {"part": _part("")})
        async for data in pieces(call, write):
            yield data
        text, end = "".join(texts), last[0]
        answer = AnswerDelta(0, text, ids, None, end.finish_reason, end.stop_reason)
        done = self._finish(answer, totals)
        yield self._event("output_text.done", self._place | {"text": text, "logprobs": []})
        yield self._event("content_part.done", self._place | {"part": _part(text)})
        yield self._event("output_item.done", {"output_index": 0, "item": done["output"][0]})
        yield self._event(done["status"], {"response": done})

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    @property
    def _item_id(self) -> str:
        return "msg" + self.response_id.removeprefix("resp")

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": f"response.{kind}", "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: response.{kind}\n".encode() + event(data)

    def _finish(self, answer: AnswerDelta, totals: Totals) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        body = self._response("incomplete" if cut else "completed", answer.text, totals, cut)
        if self.body.store is not False:
            said = {"role": "assistant", "content": answer.text}
            self.keep(Stored(
                body, self.body.instructions, [*self.turn.messages, said], self.turn.prompt,
                [*self.turn.token_ids, *answer.token_ids], answer.text,
            ))  # fmt: skip
        return body

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(
        self, status: str, text: str | None, totals: Totals | None, cut: bool | None
    ) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.response_id, "object": "response", "created_at": self.created, "status": status,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self.model,
            "output": [] if text is None else [self._item(status, text)],
            "parallel_tool_calls": True, "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None}, "store": body.store is not False,
            "temperature": body.temperature, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
            "tools": [], "top_p": body.top_p, "truncation": "disabled", "metadata": body.metadata or {},
            "usage": None if totals is None else _usage(totals),
        }  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(totals: Totals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached},
        "output_tokens": totals.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt + totals.completion,
    }
