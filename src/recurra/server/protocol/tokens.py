"""``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from recurra.server.protocol.base import Body, Int
from recurra.server.protocol.chat import ChatFields, ChatMessage


class TokenizeRequest(ChatFields, Body):
    """A text, or messages, to turn into token ids."""

    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.prompt is None) == (not self.messages):
            raise PydanticCustomError("one_of", "give prompt or messages, one of them")
        return self


class TokenizeResponse(TypedDict):
    """Token ids, and on request the text of each."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    tokens: list[Int]


class DetokenizeResponse(TypedDict):
    """The text."""

    prompt: str
