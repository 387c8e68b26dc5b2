"""Small functions that the Triton kernels share. All compute in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` with full relative precision for very negative x as well.

    The obvious form loses every digit below x = -16, where the 1 swallows the exponential, and the
    hardware's logarithm is inexact near 1. With e = exp(-|x|) in (0, 1] and s = e / (2 + e) <= 1/3,
    log(1 + e) = 2 atanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + ...); the terms left out are below 1.5e-9.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 15.0
    series = series * q + 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def decay_of(x):
    """``exp(x)`` for x <= 0 to float32's last digit.

    The hardware's exponential is off by two units in the last place, and a state is multiplied by a decay
    at every token. x = n ln 2 + r with |r| <= ln(2) / 2, and a polynomial in r: terms left out are below 6e-9.
    """
    x = tl.where(x < -87.0, -87.0, x)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * tl.exp2(n)


@triton.jit
def step_size(dt, bias, low, high, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):
    """The step of the recurrence from its raw projection: bias, softplus, bounds."""
    dt = dt + bias
    if SOFTPLUS:
        dt = softplus(dt)
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, low), high)
    return dt


@triton.jit
def silu(x):
    """``x * sigmoid(x)``, finite for every finite x."""
    return x / (1.0 + tl.exp(-x))
