"""What a request may ask of sampling, checked once at construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from recurra.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100


def _require(ok: bool, param: str, value: object, need: str) -> None:
    if not ok:
        raise RequestError(f"{param} must be {need}, got {value!r}", param=param)


_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")


def _whole(param: str, value: Any) -> int:
    """An integer of any library as Python's own."""
    _require(isinstance(value, Integral) and not isinstance(value, bool), param, value, "an integer")
    return int(value)


def _number(param: str, value: Any) -> float:
    _require(isinstance(value, Real) and not isinstance(value, bool), param, value, "a number")
    return value if isinstance(value, int) else float(value)


def _listed(param: str, value: Any) -> tuple[Any, ...]:
    _require(
        value is None or (isinstance(value, Iterable) and not isinstance(value, str | bytes)),
        param, value, "a list",
    )  # fmt: skip
    return () if value is None else tuple(value)


def _strings(param: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    found = (value,) if isinstance(value, str) and value else _listed(param, value or ())
    wrong = next((s for s in found if not (isinstance(s, str) and s)), None)
    _require(wrong is None, param, wrong, "non-empty strings")
    return found


def _bias(value: Any) -> dict[int, float]:
    """Token id to bias; ids may be spelled as text, as JSON must."""
    _require(
        value is None or isinstance(value, Mapping), "logit_bias", value, "a map of token ids to numbers"
    )
    found: dict[int, float] = {}
    for key, bias in (value or {}).items():
        try:
            token = int(key) if isinstance(key, str) else _whole("logit_bias", key)
        except ValueError:
            raise RequestError(
                f"logit_bias: its keys are token ids, got {key!r}", param="logit_bias"
            ) from None
        number = _number("logit_bias", bias)
        _require(not math.isnan(number), "logit_bias", bias, "a number")
        found[token] = float(min(100.0, max(-100.0, number)))
    return found


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to end. Names and meanings are vLLM's.

    Attributes:
        n: answers for one prompt; the prompt is computed once and its state forked.
        temperature: 0 means greedy.
        top_p, top_k, min_p: keep the likeliest tokens; top_k 0 or -1 keeps all.
        presence_penalty, frequency_penalty: subtracted for generated tokens, in [-2, 2].
        repetition_penalty: divides (or multiplies negative) logits of prompt and generated tokens.
        seed: same seed and prompt, same text, whatever else is in the batch.
        stop: strings that end the answer, even across token boundaries.
        stop_token_ids: tokens that end the answer.
        max_tokens: answer length limit; None means up to the model length.
        min_tokens: no stop (of any kind) before this many tokens.
        ignore_eos: the model's end token is an ordinary token.
        logprobs: this many likeliest alternatives for each answer token (0: the chosen alone).
        prompt_logprobs: the same for prompt tokens; the first has none.
        logit_bias: token id to added bias, clamped to [-100, 100].
        bad_words: strings that must not be produced.
        skip_special_tokens: leave special tokens out of text.
        detokenize: produce text at all.

    Raises:
        RequestError: a field out of its range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._settle_types()
        stop = self.stop
        _require(1 <= self.n <= 1024, "n", self.n, "from 1 to 1024")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "from 0 to 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (all) or positive")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "from -2 to 2")
        _require(
            0.0 < self.repetition_penalty <= 100.0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0 and at most 100",
        )
        _require(
            len(stop) <= MAX_STOP_STRINGS, "stop", f"{len(stop)} strings",
            f"at most {MAX_STOP_STRINGS} strings",
        )  # fmt: skip
        _require(
            self.max_tokens is None or self.max_tokens >= 0,
            "max_tokens",
            self.max_tokens,
            "at least 0",
        )
        _require(
            self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "min_tokens",
            self.min_tokens,
            "from 0 to max_tokens",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_LOGPROBS,
                name,
                value,
                f"from 0 to {MAX_LOGPROBS}",
            )

    def _settle_types(self) -> None:
        """Plain Python values of the right types, or an error that names the field: what a kernel or a
        message between processes chokes on must not get that far."""
        settled: dict[str, Any] = {
            name: _whole(name, getattr(self, name)) for name in ("n", "top_k", "min_tokens")
        }
        for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed"):
            settled[name] = None if getattr(self, name) is None else _whole(name, getattr(self, name))
        for name in _NUMBERS:
            settled[name] = _number(name, getattr(self, name))
        for name in _SWITCHES:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in ("stop", "bad_words"):
            settled[name] = _strings(name, getattr(self, name))
        ids = _listed("stop_token_ids", self.stop_token_ids)
        settled["stop_token_ids"] = tuple(_whole("stop_token_ids", token) for token in ids)
        settled["logit_bias"] = _bias(self.logit_bias)
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature < 1e-5
