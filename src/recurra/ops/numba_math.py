"""exp, softplus, sigmoid and silu in float32 for Numba kernels, written so that LLVM vectorises them.

Without Intel's vector maths library Numba calls the C library once a value; these are a dozen
multiply-adds with neither branches nor table look-ups, so a loop over them becomes vector code on any CPU.

* ``2^t = 2^n * 2^r`` with n the integer nearest t and ``|r| <= 1/2``; ``2^r`` is a polynomial fitted for
  least relative error (2e-9 before rounding). Adding and taking away 1.5 * 2^23 rounds to an integer and
  leaves n in the low bits of the sum; a power of two is made by writing its exponent bits.
* ``log(1 + u) = 2 atanh(s)`` with ``s = u / (2 + u)``, an odd series in s, fitted for u from 0 to 1.

NaN goes through. The functions here must not be compiled with ``reassoc``, which would undo the rounding
trick; each instruction keeps the flags that it was compiled with, so kernels that inline them may use it.

Numba's on-disk cache watches the file of a kernel alone: after changing this file, clear the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

#: Flags for kernels: everything that vectorising sums needs, and NaN and infinity still propagate.
FAST = {"reassoc", "contract", "nsz", "arcp"}

_EXACT = {"contract", "nsz"}
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_ROUND_BITS = np.int32(0x4B400000)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693115234375)  # 12 low bits zero: its product with a small integer is exact
_LN2_LOW = np.float32(3.194618329871446e-05)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ZERO = np.float32(0.0)


@intrinsic  # type: ignore[untyped-decorator]
def float_bits(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def bits_float(typingctx: Any, value: Any) -> Any:
    """The float32 whose bits are this int32."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(cache=True, fastmath=_EXACT, error_model="numpy")  # type: ignore[untyped-decorator]
def exp2_normal(t: np.float32) -> np.float32:
    """``2^t`` for t up to 127; below -126 it stays at 2^-126 (1.2e-38), where a decay has long been nothing."""
    t = np.float32(-126.0) if t < np.float32(-126.0) else t
    shifted = t + _ROUND
    r = t - (shifted - _ROUND)
    p = np.float32(0.00015353361959569156)
    p = p * r + np.float32(0.0013398873852565885)
    p = p * r + np.float32(0.00961843691766262)
    p = p * r + np.float32(0.055503323674201965)
    p = p * r + np.float32(0.24022647738456726)
    p = p * r + np.float32(0.6931471824645996)
    p = p * r + _ONE
    scale = np.int32((float_bits(shifted) - _ROUND_BITS + np.int32(127)) << np.int32(23))
    return np.float32(p * bits_float(scale))


@njit(cache=True, fastmath=_EXACT, error_model="numpy")  # type: ignore[untyped-decorator]
def exp(x: np.float32) -> np.float32:
    """e^x over the whole range: 0 below, infinity above, gradual underflow between."""
    x = np.float32(-104.0) if x < np.float32(-104.0) else x
    x = np.float32(89.0) if x > np.float32(89.0) else x
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.float32(0.001384364441037178)
    p = p * r + np.float32(0.008374162949621677)
    p = p * r + np.float32(0.04166800156235695)
    p = p * r + np.float32(0.16666431725025177)
    p = p * r + np.float32(0.4999999403953552)
    p = p * r + _ONE
    p = p * r + _ONE
    power = float_bits(shifted) - _ROUND_BITS
    half = power >> np.int32(1)  # the scale in two factors, since 2^-150 and 2^128 are no normal numbers
    first = np.int32((half + np.int32(127)) << np.int32(23))
    second = np.int32((power - half + np.int32(127)) << np.int32(23))
    return np.float32(p * bits_float(first) * bits_float(second))


@njit(cache=True, fastmath=_EXACT, error_model="numpy")  # type: ignore[untyped-decorator]
def softplus(x: np.float32) -> np.float32:
    """``log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)``, accurate relative to the result at both ends."""
    positive = _ZERO if x < _ZERO else x
    u = exp(np.float32(x if x < _ZERO else -x))
    s = u / (u + _TWO)
    q = s * s
    p = np.float32(0.2441306859254837)
    p = p * q + np.float32(0.21393249928951263)
    p = p * q + np.float32(0.2862072288990021)
    p = p * q + np.float32(0.3999869227409363)
    p = p * q + np.float32(0.6666668057441711)
    p = p * q + _TWO
    return np.float32(positive + p * s)


@njit(cache=True, fastmath=_EXACT, error_model="numpy")  # type: ignore[untyped-decorator]
def sigmoid(x: np.float32) -> np.float32:
    """``1 / (1 + e^-x)``."""
    return np.float32(_ONE / (_ONE + exp(np.float32(-x))))


@njit(cache=True, fastmath=_EXACT, error_model="numpy")  # type: ignore[untyped-decorator]
def silu(x: np.float32) -> np.float32:
    """``x / (1 + e^-x)``."""
    return np.float32(x / (_ONE + exp(np.float32(-x))))
