"""Token counts."""

from __future__ import annotations

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """Prompt tokens whose state was there already."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a call: each prompt once, all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
