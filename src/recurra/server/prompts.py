"""From a request body to token ids that the engine will take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from recurra.errors import RequestError
from recurra.server.messages import EngineInfo
from recurra.server.protocol.chat import ChatFields

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer

#: Longer texts are tokenised in a thread, so that other requests go on meanwhile.
_THREAD_FROM = 4096


async def _encode(work: Callable[[], list[int]], size: int) -> list[int]:
    return await asyncio.to_thread(work) if size > _THREAD_FROM else work()


def need_tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """The tokenizer, or the 400 that there is none."""
    if tokenizer is None:
        raise RequestError(
            f"{param}: this server runs without a tokenizer; send token ids to /v1/completions",
            param=param,
            code="no_tokenizer",
        )
    return tokenizer


async def text_ids(tokenizer: Tokenizer | None, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text.

    Raises:
        RequestError: an empty text, or no tokenizer.
    """
    known = need_tokenizer(tokenizer, param)
    if not text:
        raise RequestError(f"{param} is empty; give at least one character or token id", param=param)
    return await _encode(lambda: known.encode(text, add_special_tokens), len(text))


async def chat_ids(tokenizer: Tokenizer | None, body: ChatFields) -> list[int]:
    """Token ids of a conversation.

    Raises:
        RequestError: no tokenizer, no chat template, or a message that it can't take.
    """
    known = need_tokenizer(tokenizer, "messages")
    messages, kwargs = body.plain_messages(), body.template_kwargs()
    size = sum(len(str(message["content"])) for message in messages)
    return await _encode(lambda: known.chat(messages, **kwargs), size)


def check_ids(ids: list[int], info: EngineInfo, param: str) -> None:
    """Refuse what is no prompt of this model.

    Raises:
        RequestError: no token, or one that the model doesn't have.
    """
    if not ids:
        raise RequestError(f"{param} is empty; give at least one token", param=param)
    for extreme in (min(ids), max(ids)):
        if not 0 <= extreme < info.vocab_size:
            raise RequestError(
                f"{param}: token id {extreme} is not from 0 to {info.vocab_size - 1}", param=param
            )


def answer_limit(
    num_prompt: int, info: EngineInfo, asked: int | None, default: int | None, param: str
) -> int:
    """Most tokens of the answer: what was asked for, else ``default``, else what is left.

    Raises:
        RequestError: ``context_length_exceeded``.
    """
    left = info.max_model_len - num_prompt
    wanted = 1 if asked is None else asked
    if left < wanted:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and {wanted} for the answer makes more than the longest "
            f"request of this server, {info.max_model_len} tokens; shorten the prompt or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    return left if default is None else min(default, left)
