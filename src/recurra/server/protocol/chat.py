"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from recurra.errors import RequestError
from recurra.server.protocol.base import Int
from recurra.server.protocol.sampling import SamplingFields
from recurra.server.protocol.usage import Usage

#: Names that the template gets from elsewhere.
_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
})  # fmt: skip
_REFUSED_IN_MESSAGE = ("tool_calls", "tool_call_id", "function_call", "audio")


class Part(BaseModel):
    """A piece of a message; only text can be read."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: str | list[Part] | None = None
    name: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message for the chat template.

        Raises:
            RequestError: 400, a role or a content that can't be honoured.
        """
        if self.role not in ("system", "developer", "user", "assistant"):
            raise RequestError(
                f"{where}.role: {self.role!r:.40} is not supported; use system, developer, user or assistant",
                param="messages",
                code="unsupported_role",
            )
        for name in _REFUSED_IN_MESSAGE:
            if (self.model_extra or {}).get(name):
                raise RequestError(
                    f"{where}.{name} is not supported by this server",
                    param="messages",
                    code="unsupported_field",
                )
        if self.content is None:
            raise RequestError(f"{where}.content is missing", param="messages")
        message: dict[str, Any] = {"role": self.role, "content": self._content(where)}
        return message if self.name is None else {**message, "name": self.name}

    def _content(self, where: str) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        parts = []
        for number, part in enumerate(self.content or ()):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise RequestError(
                    f"{where}.content[{number}]: type {part.type!r:.40} is not supported, this model reads text",
                    param="messages",
                    code="unsupported_content",
                )
            parts.append({"type": "text", "text": part.text})
        return parts


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        return [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``Tokenizer.chat``: the caller's own names for the template too."""
        given = self.chat_template_kwargs or {}
        taken = _RESERVED & set(given)
        if taken:
            raise RequestError(
                f"chat_template_kwargs: {min(taken)} is set by its own field", param="chat_template_kwargs"
            )
        return {
            **given,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
        }


class ChatRequest(ChatFields, SamplingFields):
    """A conversation to continue."""

    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """What the engine is asked for.

        Raises:
            RequestError: ``top_logprobs`` without ``logprobs``.
        """
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class TokenCandidate(TypedDict):
    """One candidate at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenCandidate):
    """The token taken, and the likeliest ones."""

    top_logprobs: list[TokenCandidate]


class ChatLogprobs(TypedDict):
    """An entry a token."""

    content: list[ChatTokenLogprob]


class AnswerMessage(TypedDict):
    """The answer, or (in a stream) what is new in it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]


class ChatChoice(TypedDict):
    """One answer (``message``), or a piece of it (``delta``)."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[AnswerMessage]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatResponse(TypedDict):
    """Whole, or one event of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
