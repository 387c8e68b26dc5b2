"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from recurra.server.protocol.base import Int
from recurra.server.protocol.sampling import SamplingFields
from recurra.server.protocol.usage import Usage

PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: Any) -> list[str | list[int]]:
    """Any of OpenAI's four forms as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _is_ids(value):
            return [value]
        if all(_is_ids(item) for item in value):
            return value
    if value == []:
        raise PydanticCustomError("empty_prompt", "the list is empty")
    raise PydanticCustomError("prompt_form", "must be " + PROMPT_FORMS)


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(SamplingFields):
    """A text to continue."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(TypedDict):
    """Four parallel lists, an entry a token; ``text_offset`` counts characters of ``text``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class CompletionResponse(TypedDict):
    """Whole, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
