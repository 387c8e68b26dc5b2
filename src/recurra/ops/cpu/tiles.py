"""Small pieces that prefill kernels share: partial vectors, powers of two, and 16 by 16 transposes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from recurra.ops.cpu.jit import i32, i64, instruction, kernel, pointer
from recurra.ops.cpu.vectors import (
    LANES,
    add,
    fma,
    get,
    load,
    load_first,
    mul,
    power_of_two,
    put,
    splat,
    store,
    store_first,
    sub,
    vec,
    where_less,
)

_int = types.int64
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits


@kernel
def load_some(address: int, count: int) -> Any:
    """Up to 16 float32; zeros in the lanes from ``count`` on, whose memory isn't touched."""
    if count >= LANES:
        return load(address)
    return load_first(address, count)


@kernel
def store_some(address: int, value: Any, count: int) -> None:
    """Write up to 16 float32."""
    if count >= LANES:
        store(address, value)
    else:
        store_first(address, value, count)


@kernel
def exp2(t: Any) -> Any:
    """2^t for t up to 127. Below -126 it stays at 1.2e-38, where a decay has long been nothing.

    2^t = 2^n 2^r with n the integer nearest t; 2^r for |r| <= 1/2 is a polynomial fitted for least relative
    error, 2e-9 before rounding.
    """
    t = where_less(t, splat(-126.0), splat(-126.0), t)
    shifted = add(t, splat(_ROUND))
    r = sub(t, sub(shifted, splat(_ROUND)))
    p = fma(splat(0.00015353361959569156), r, splat(0.0013398873852565885))
    p = fma(p, r, splat(0.00961843691766262))
    p = fma(p, r, splat(0.055503323674201965))
    p = fma(p, r, splat(0.24022647738456726))
    p = fma(p, r, splat(0.6931471824645996))
    p = fma(p, r, splat(1.0))
    return mul(p, power_of_two(shifted, 127))


def _butterfly(builder: Any, rows: list[Any], step: int) -> None:
    """Swap the off-diagonal ``step`` by ``step`` blocks of each ``2 step`` square."""
    upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
    lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
    kind = ir.VectorType(i32, LANES)
    for i in range(LANES):
        if not i & step:
            a, b = rows[i], rows[i + step]
            rows[i] = builder.shuffle_vector(a, b, ir.Constant(kind, upper))
            rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(kind, lower))


@instruction(types.void, (_int, _int, _int, _int))
def transpose_square(builder: Any, source: Any, source_bytes: Any, target: Any, target_bytes: Any) -> None:
    """Transpose 16 rows of 16 float32, given the bytes from one row to the next on both sides."""

    def row(base: Any, stride: Any, i: int) -> Any:
        return pointer(builder, builder.add(base, builder.mul(stride, ir.Constant(i64, i))), vec)

    rows = [builder.load(row(source, source_bytes, i), align=4) for i in range(LANES)]
    for step in (1, 2, 4, 8):
        _butterfly(builder, rows, step)
    for i in range(LANES):
        builder.store(rows[i], row(target, target_bytes, i), align=4)


@kernel
def transpose(
    source: int, source_bytes: int, target: int, target_bytes: int, rows: int, columns: int
) -> None:
    """``target[c, r] = source[r, c]`` for float32 matrices, in squares where they fit."""
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            a = source + r * source_bytes + 4 * c
            b = target + c * target_bytes + 4 * r
            if r + LANES <= rows and c + LANES <= columns:
                transpose_square(a, source_bytes, b, target_bytes)
            else:
                for i in range(min(LANES, rows - r)):
                    for j in range(min(LANES, columns - c)):
                        put(b + j * target_bytes + 4 * i, get(a + i * source_bytes + 4 * j))
