"""What callers hand over becomes a Request, or an error that names the field."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from recurra.engine.tokenizer import Tokenizer
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import PromptInput, Request

_NO_TOKENIZER = (
    "this model has no tokenizer, so {what} can't be served. {instead} (or load the model with tokenizer=...)"
)


def make_request(
    request_id: str,
    prompt: PromptInput,
    params: SamplingParams,
    priority: int,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
) -> Request:
    """Read a prompt and check that it can be served.

    ``params.max_tokens`` of the result is a number, clamped to what ``max_model_len`` leaves.

    Raises:
        RequestError: with ``param`` naming the field at fault.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params must be SamplingParams, got {type(params).__name__}", param="sampling_params"
        )
    text, ids = read_prompt(prompt, tokenizer)
    check_ids(ids, vocab_size)
    check_params(params, tokenizer, vocab_size)
    max_tokens = room(len(ids), params.max_tokens, max_model_len)
    if max_tokens != params.max_tokens:
        least = min(params.min_tokens, max_tokens)
        params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=least)
    return Request(
        request_id, ids, params, prompt=text, priority=read_priority(priority), cache_salt=read_salt(prompt)
    )


def read_prompt(prompt: PromptInput, tokenizer: Tokenizer | None) -> tuple[str | None, tuple[int, ...]]:
    """The prompt's text, if it has one, and its token ids."""
    text: object = prompt
    ids: object = None
    if isinstance(prompt, dict):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
        if unknown or not prompt:
            raise RequestError(
                "a prompt given as a dict has 'prompt_token_ids' or 'prompt', and perhaps 'cache_salt', got "
                f"{sorted(prompt)!r}",
                param="prompt",
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif not isinstance(prompt, str):
        text, ids = None, prompt
    if ids is not None:
        return text if isinstance(text, str) else None, _as_ids(ids)
    if not isinstance(text, str):
        raise RequestError(f"prompt must be text or token ids, got {type(text).__name__}", param="prompt")
    if tokenizer is None:
        instead = "Give token ids"
        raise RequestError(_NO_TOKENIZER.format(what="a text prompt", instead=instead), param="prompt")
    return text, tuple(tokenizer.encode(text))


def read_salt(prompt: PromptInput) -> str | None:
    """What a prompt given as a dict says of whom it shares kept states with."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt must be a non-empty string, got {salt!r:.80}", param="cache_salt")
    return salt


def _as_ids(ids: object) -> tuple[int, ...]:
    try:
        assert isinstance(ids, Iterable)
        assert not isinstance(ids, (str, bytes, dict, set))
        return tuple(_integer(value) for value in ids)
    except (TypeError, AssertionError):
        raise RequestError("prompt_token_ids must be a list of integers", param="prompt_token_ids") from None


def read_priority(value: object) -> int:
    """The priority as Python's own integer."""
    try:
        return _integer(value)
    except TypeError:
        raise RequestError(f"priority must be an integer, got {value!r:.80}", param="priority") from None


def _integer(value: Any) -> int:
    """An integer of any library; truth values, which Python counts as integers, are none.

    Raises:
        TypeError: something else.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(value)
    return operator.index(value)


def check_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuse an empty prompt and ids that the model has no embedding for."""
    if not ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    for bad in (min(ids), max(ids)):
        if not 0 <= bad < vocab_size:
            raise RequestError(
                f"prompt_token_ids holds {bad}; the model knows 0 to {vocab_size - 1}",
                param="prompt_token_ids",
            )


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Refuse what this model or this engine can't do."""
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} holds the token {token}; the model knows 0 to {vocab_size - 1}", param=name
                )
    if params.bad_words and tokenizer is None:
        instead = "Use logit_bias with token ids"
        raise RequestError(_NO_TOKENIZER.format(what="bad_words", instead=instead), param="bad_words")
    if params.stop and tokenizer is None:
        instead = "Use stop_token_ids"
        raise RequestError(_NO_TOKENIZER.format(what="a stop string", instead=instead), param="stop")
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize=True", param="stop")


def room(num_prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens the answer may have."""
    left = max_model_len - num_prompt
    if left < 0 or (left == 0 and max_tokens != 0):
        raise RequestError(
            f"the prompt has {num_prompt} tokens and the answer needs room too; max_model_len is "
            f"{max_model_len}. Shorten the prompt, or start the engine with a larger max_model_len.",
            param="prompt",
            code="context_length_exceeded",
        )
    return left if max_tokens is None else min(max_tokens, left)


def spell_out(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token sequences of a bad word: at the start of a text and after a space."""
    spelled = {tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, " " + word)}
    return sorted(ids for ids in spelled if ids)
