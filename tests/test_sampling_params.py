"""Values of the wrong type are refused where they are given, by name; odd ones of the right type become plain."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams

WRONG: list[tuple[str, Any]] = [
    *[(name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in ("1", None, True, [1])],
    *[(name, value) for name in ("n", "top_k", "min_tokens") for value in ("1", None, True, 1.5)],
    *[(name, value) for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed") for value in ("1", 1.5, True)],
    *[(name, value) for name in ("ignore_eos", "skip_special_tokens", "detokenize") for value in ("yes", 1, None)],
    *[("stop", value) for value in (5, [""], [1], [b"x"], ["x"] * 10_000)],
    *[("bad_words", value) for value in (5, [""], [1])],
    *[("stop_token_ids", value) for value in (5, ["a"], [1.0], "12")],
    *[("logit_bias", value) for value in ([1], {"a": 1}, {1: "x"}, {1: float("nan")}, {None: 1}, {True: 1}, {1.5: 1}, {"1.5": 1})],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:24])
def test_wrong_types_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numbers_of_other_libraries_become_plain() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=Fraction(1, 2), seed=np.uint8(3), max_tokens=np.int32(4),
        stop_token_ids=np.array([1, 2]), logit_bias={np.int64(3): np.float64(500.0), "4": -1},
        bad_words="word", stop="end",
    )  # fmt: skip
    plain = SamplingParams(
        n=2, temperature=0.5, top_p=0.5, seed=3, max_tokens=4, stop_token_ids=[1, 2],
        logit_bias={3: 100.0, 4: -1.0}, bad_words=["word"], stop=["end"],
    )  # fmt: skip
    assert repr(params) == repr(plain)
