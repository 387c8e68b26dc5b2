"""The fields that become SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from recurra.engine.generation import merged
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams
from recurra.server.protocol.base import Int, Streamed, named

#: Passed on under their own names; null leaves SamplingParams' default.
_PASSED = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens",
    "ignore_eos", "prompt_logprobs", "bad_words", "skip_special_tokens",
)  # fmt: skip


class SamplingFields(Streamed):
    """How an answer is sampled and when it ends; ranges are SamplingParams' to check."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling_params(
        self, vocab_size: int, has_tokenizer: bool, defaults: Mapping[str, Any], **settled: Any
    ) -> SamplingParams:
        """The engine's parameters.

        Args:
            vocab_size: V.
            has_tokenizer: text can be made and searched.
            defaults: the checkpoint's, for fields that the request leaves out.
            settled: what the kind of request decides.

        Raises:
            RequestError: 400, naming the field.
        """
        _check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        self._check_text(has_tokenizer)
        given = named({name: getattr(self, name) for name in _PASSED}) | settled
        values = merged(defaults, given)
        bias = _logit_bias(self.logit_bias, vocab_size)
        params = SamplingParams(**values, logit_bias=bias, detokenize=has_tokenizer)
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs can't be streamed; set stream=false", param="prompt_logprobs")
        return params

    def _check_text(self, has_tokenizer: bool) -> None:
        for name in ("stop", "bad_words"):
            if getattr(self, name) and not has_tokenizer:
                raise RequestError(
                    f"{name}: this model has no tokenizer; use stop_token_ids",
                    param=name,
                    code="no_tokenizer",
                )


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{name}: token id {wrong} is not from 0 to {vocab_size - 1}", param=name)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    try:
        found = {int(key): value for key, value in (bias or {}).items()}
    except ValueError:
        raise RequestError("logit_bias: its keys are token ids", param="logit_bias") from None
    _check_ids("logit_bias", found, vocab_size)
    return found
