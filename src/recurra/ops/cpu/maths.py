"""exp, softplus and silu on vectors, written from their series.

A NaN stays a NaN in all of them. ``tests/ops/test_cpu_maths.py`` holds their errors against float64.
"""

from __future__ import annotations

from typing import Any

from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.vectors import add, div, fma, mul, power_of_two, splat, sub, where_less

_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # ln 2 in two parts: n * high is exact for |n| < 2^13
_LN2_LOW = -2.12194440e-4


@kernel
def exp(x: Any) -> Any:
    """e^x: 0 below -86.98, where it is 1.7e-38, and infinity above 88.7.

    x = n ln 2 + r with |r| <= ln(2) / 2, e^x = 2^n e^r, and e^r by its Taylor series to r^7 / 7!, whose
    remainder is below 2^-27 there.
    """
    shifted = fma(x, splat(_LOG2E), splat(_ROUND))
    n = sub(shifted, splat(_ROUND))
    r = fma(n, splat(-_LN2_HIGH), x)
    r = fma(n, splat(-_LN2_LOW), r)
    p = fma(splat(1.0 / 5040.0), r, splat(1.0 / 720.0))
    p = fma(p, r, splat(1.0 / 120.0))
    p = fma(p, r, splat(1.0 / 24.0))
    p = fma(p, r, splat(1.0 / 6.0))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    # 2^n as 2 * 2^(n - 1): n = 128 is still needed just below the overflow.
    y = mul(mul(p, power_of_two(shifted, 126)), splat(2.0))
    y = where_less(x, splat(-86.98), splat(0.0), y)  # 2^(n - 1) is subnormal from n = -126
    return where_less(splat(88.72283), x, splat(float("inf")), y)


@kernel
def log1p_unit(u: Any) -> Any:
    """log(1 + u) for u in [0, 1], to the last bits of small u too.

    With s = u / (2 + u), log(1 + u) = 2 atanh(s) = 2 s (1 + s^2/3 + s^4/5 + ...), s <= 1/3.
    """
    below = add(u, splat(2.0))
    s = div(u, below)
    # What rounding took from s, to first order: (u - s * (u + 2)) / (u + 2), the sum kept in two parts.
    lost = sub(u, sub(below, splat(2.0)))
    left = sub(fma(sub(splat(0.0), s), below, u), mul(s, lost))
    reciprocal = fma(fma(splat(0.08), u, splat(-0.2455)), u, splat(0.5))
    rest = mul(left, add(reciprocal, reciprocal))
    q = mul(s, s)
    p = fma(splat(1.0 / 17.0), q, splat(1.0 / 15.0))
    p = fma(p, q, splat(1.0 / 13.0))
    p = fma(p, q, splat(1.0 / 11.0))
    p = fma(p, q, splat(1.0 / 9.0))
    p = fma(p, q, splat(1.0 / 7.0))
    p = fma(p, q, splat(1.0 / 5.0))
    p = fma(p, q, splat(1.0 / 3.0))
    twice = add(s, s)
    return add(twice, fma(mul(twice, q), p, rest))


@kernel
def softplus(x: Any) -> Any:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)"""
    negated = sub(splat(0.0), x)
    tail = log1p_unit(exp(where_less(x, splat(0.0), x, negated)))
    return add(where_less(x, splat(0.0), splat(0.0), x), tail)


@kernel
def silu(x: Any) -> Any:
    """x / (1 + e^-x)"""
    return div(x, add(splat(1.0), exp(sub(splat(0.0), x))))
