"""The vectorised transcendental functions, held against float64 over their whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from recurra.ops import numba_math

EPS = float(np.finfo(np.float32).eps)


@njit
def _map_exp(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = numba_math.exp(x[i])


@njit
def _map_exp2_normal(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = numba_math.exp2_normal(x[i])


@njit
def _map_softplus(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = numba_math.softplus(x[i])


@njit
def _map_silu(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = numba_math.silu(x[i])


@njit
def _map_sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = numba_math.sigmoid(x[i])


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


#: function under test, its definition, the range over which it is normal
CASES = [
    (_map_exp, np.exp, -87.3, 88.7),
    (_map_exp2_normal, np.exp2, -126.0, 127.0),
    (_map_softplus, _softplus, -87.0, 500.0),
    (_map_sigmoid, _sigmoid, -87.0, 500.0),
    (_map_silu, _silu, -87.0, 500.0),
]


def _apply(function: Callable[..., None], values: Any) -> np.ndarray:
    x = np.asarray(values, dtype=np.float32)
    out = np.full_like(x, 12345.0)
    function(x, out)
    return out


@pytest.mark.parametrize(("function", "definition", "low", "high"), CASES)
def test_error_is_two_units_in_the_last_place(
    function: Callable[..., None], definition: Callable[..., np.ndarray], low: float, high: float
) -> None:
    x = np.concatenate(
        [np.linspace(low, high, 400_001), np.linspace(-2, 2, 100_001), np.geomspace(1e-30, 1, 1000)]
    ).astype(np.float32)
    exact = definition(x.astype(np.float64))
    got = _apply(function, x)
    normal = np.abs(exact) > np.finfo(np.float32).tiny
    error = np.abs(got[normal] - exact[normal]) / np.abs(exact[normal])
    assert error.max() <= 2 * EPS, (error.max() / EPS, x[normal][error.argmax()])


@pytest.mark.parametrize("function", [case[0] for case in CASES])
def test_nan_goes_through(function: Callable[..., None]) -> None:
    x = np.zeros(37, dtype=np.float32)
    x[[0, 17, 36]] = np.nan
    assert (np.isnan(_apply(function, x)) == np.isnan(x)).all()


def test_exp_at_the_ends() -> None:
    got = _apply(_map_exp, [-np.inf, -1e30, -104.0, -95.0, 0.0, 88.72, 89.0, np.inf])
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert abs(got[3] - np.exp(-95.0)) < 1e-44  # a subnormal number
    assert got[4] == 1.0
    assert np.isfinite(got[5])
    assert got[6:].tolist() == [np.inf, np.inf]


def test_softplus_and_silu_at_the_ends() -> None:
    assert _apply(_map_softplus, [-np.inf, -200.0, 0.0, 1e30, np.inf]).tolist() == pytest.approx(
        [0.0, 0.0, np.log(2), 1e30, np.inf]
    )
    assert _apply(_map_silu, [-1e30, -200.0, 0.0, 1e30]).tolist() == pytest.approx([0.0, 0.0, 0.0, 1e30])
    assert _apply(_map_sigmoid, [-np.inf, -1e30, 0.0, np.inf]).tolist() == [0.0, 0.0, 0.5, 1.0]


def test_decay_below_the_normal_range_is_negligible() -> None:
    got = _apply(_map_exp2_normal, [-127.0, -1e30, -np.inf])
    assert ((got >= 0) & (got < 1.2e-38)).all()


@pytest.mark.parametrize("function", [_map_exp, _map_softplus, _map_silu, _map_exp2_normal])
def test_loops_are_vectorised(function: Any) -> None:
    _apply(function, [0.0])
    assembly = next(iter(function.inspect_asm().values()))
    assert "mulps" in assembly or "fmadd213ps" in assembly or "fmla" in assembly
