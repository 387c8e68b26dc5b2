"""Sixteen float32 lanes as a value inside kernels, and the instructions on them.

Written as LLVM vectors, so that no loop has to be vectorised by luck: one register with AVX-512, two
with AVX2, four with NEON or SSE. No instruction here carries a fast-math flag: a NaN stays a NaN and the
order of every sum is the one written down.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from recurra.ops.cpu.jit import declare, f16, f32, i1, i16, i32, i64, instruction, pointer

LANES = 16

vec = ir.VectorType(f32, LANES)
ivec = ir.VectorType(i32, LANES)
mask = ir.VectorType(i1, LANES)

_int = types.int64
_float = types.float32


class F32x16(types.Type):  # type: ignore[misc]
    """Numba's name for the vector."""

    def __init__(self) -> None:
        super().__init__("f32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, vec)


def splat_of(builder: Any, scalar: Any, kind: Any = vec) -> Any:
    """One scalar in every lane."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(i32, 0))
    zeros = ir.Constant(ivec, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first ``count`` lanes (an int64)."""
    lanes = ir.Constant(ivec, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat_of(builder, builder.trunc(count, i32), ivec))


def widen(builder: Any, raw: Any, kind: int) -> Any:
    """Stored lanes (see :data:`STORED`) as float32, exactly."""
    if kind == BF16:
        bits = builder.shl(builder.zext(raw, ivec), ir.Constant(ivec, [16] * LANES))
        return builder.bitcast(bits, vec)
    if kind == I8:
        return builder.sitofp(builder.sext(raw, ivec), vec)
    return builder.fpext(raw, vec) if kind == F16 else raw


#: How a matrix is stored: the codes that kernels take.
F32, BF16, F16, I8 = 0, 1, 2, 3
STORED = {
    F32: (vec, 4),
    BF16: (ir.VectorType(i16, LANES), 2),
    F16: (ir.VectorType(f16, LANES), 2),
    I8: (ir.VectorType(ir.IntType(8), LANES), 1),
}


def load_stored(builder: Any, address: Any, kind: int) -> Any:
    """Load 16 stored values at an int64 address and widen them."""
    lanes, align = STORED[kind]
    return widen(builder, builder.load(pointer(builder, address, lanes), align=align), kind)


def load_stored_first(builder: Any, address: Any, kind: int, lanes_mask: Any) -> Any:
    """Load the lanes of the mask, zeros elsewhere; memory outside the mask isn't touched."""
    lanes, align = STORED[kind]
    suffix = {F32: "v16f32", BF16: "v16i16", F16: "v16f16", I8: "v16i8"}[kind]
    load = declare(builder, f"llvm.masked.load.{suffix}.p0", lanes, [lanes.as_pointer(), i32, mask, lanes])
    zero = ir.Constant(lanes, [0.0 if kind in (F32, F16) else 0] * LANES)
    raw = builder.call(load, [pointer(builder, address, lanes), ir.Constant(i32, align), lanes_mask, zero])
    return widen(builder, raw, kind)


def prefetch_at(builder: Any, address: Any, level: int) -> None:
    """Ask for the cache line of an address, which need not exist; level 3 is the nearest cache, 2 the next."""
    byte = ir.IntType(8)
    fetch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [byte.as_pointer(), i32, i32, i32])
    builder.call(fetch, [pointer(builder, address, byte), *(ir.Constant(i32, n) for n in (0, level, 1))])


@instruction(types.void, (_int,))
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of an address, which need not exist."""
    prefetch_at(builder, address, 3)


@instruction(types.void, (_int,))
def prefetch_second(builder: Any, address: Any) -> None:
    """The same, no nearer than the second-level cache: for more than the first one holds."""
    prefetch_at(builder, address, 2)


@instruction(f32x16, (_int,))
def load(builder: Any, address: Any) -> Any:
    """Sixteen float32 at an address."""
    return load_stored(builder, address, F32)


@instruction(f32x16, (_int,))
def load_bf16(builder: Any, address: Any) -> Any:
    """Sixteen bfloat16, widened."""
    return load_stored(builder, address, BF16)


@instruction(f32x16, (_int,))
def load_f16(builder: Any, address: Any) -> Any:
    """Sixteen float16, widened."""
    return load_stored(builder, address, F16)


@instruction(f32x16, (_int,))
def load_i8(builder: Any, address: Any) -> Any:
    """Sixteen int8, as numbers."""
    return load_stored(builder, address, I8)


@instruction(f32x16, (_int, _int))
def load_first(builder: Any, address: Any, count: Any) -> Any:
    """The first ``count`` float32 at an address, zeros in the other lanes."""
    return load_stored_first(builder, address, F32, first_lanes(builder, count))


@instruction(f32x16, (_int, _int))
def load_bf16_first(builder: Any, address: Any, count: Any) -> Any:
    """The first ``count`` bfloat16, widened; zeros elsewhere."""
    return load_stored_first(builder, address, BF16, first_lanes(builder, count))


@instruction(f32x16, (_int, _int))
def load_i8_first(builder: Any, address: Any, count: Any) -> Any:
    """The first ``count`` int8, as numbers; zeros elsewhere."""
    return load_stored_first(builder, address, I8, first_lanes(builder, count))


@instruction(f32x16, (_int, _int))
def load_f16_first(builder: Any, address: Any, count: Any) -> Any:
    """The first ``count`` float16, widened; zeros elsewhere."""
    return load_stored_first(builder, address, F16, first_lanes(builder, count))


@instruction(types.void, (_int, f32x16))
def store(builder: Any, address: Any, value: Any) -> None:
    """Write all lanes."""
    builder.store(value, pointer(builder, address, vec), align=4)


@instruction(types.void, (_int, f32x16, _int))
def store_first(builder: Any, address: Any, value: Any, count: Any) -> None:
    """Write the first ``count`` lanes."""
    write = declare(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [vec, vec.as_pointer(), i32, mask])
    chosen = first_lanes(builder, count)
    builder.call(write, [value, pointer(builder, address, vec), ir.Constant(i32, 4), chosen])


@instruction(f32x16, (_float,))
def splat(builder: Any, scalar: Any) -> Any:
    """One scalar in every lane."""
    return splat_of(builder, scalar)


@instruction(f32x16, (f32x16, f32x16))
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b"""
    return builder.fadd(a, b)


@instruction(f32x16, (f32x16, f32x16))
def sub(builder: Any, a: Any, b: Any) -> Any:
    """a - b"""
    return builder.fsub(a, b)


@instruction(f32x16, (f32x16, f32x16))
def mul(builder: Any, a: Any, b: Any) -> Any:
    """a * b"""
    return builder.fmul(a, b)


@instruction(f32x16, (f32x16, f32x16))
def div(builder: Any, a: Any, b: Any) -> Any:
    """a / b"""
    return builder.fdiv(a, b)


def fma_of(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """One rounding of a * b + c."""
    return builder.call(declare(builder, "llvm.fma.v16f32", vec, [vec, vec, vec]), [a, b, c])


@instruction(f32x16, (f32x16, f32x16, f32x16))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once"""
    return fma_of(builder, a, b, c)


@instruction(f32x16, (f32x16, f32x16, f32x16, f32x16))
def where_less(builder: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """``yes`` where a < b, else ``no``: also where a or b is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), yes, no)


@instruction(f32x16, (f32x16, types.int32))
def power_of_two(builder: Any, shifted: Any, bias: Any) -> Any:
    """2^(n + bias - 127), where n is the integer that ``x + 1.5 * 2^23`` leaves in its low bits."""
    bits = builder.add(builder.bitcast(shifted, ivec), splat_of(builder, bias, ivec))
    return builder.bitcast(builder.shl(bits, ir.Constant(ivec, [23] * LANES)), vec)


def fold(builder: Any, value: Any, width: int) -> Any:
    """Add the upper half of a vector to its lower half, ``width`` lanes being left."""
    low = ir.Constant(ir.VectorType(i32, width), list(range(width)))
    high = ir.Constant(ir.VectorType(i32, width), list(range(width, 2 * width)))
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.fadd(
        builder.shuffle_vector(value, undefined, low), builder.shuffle_vector(value, undefined, high)
    )


def total_of(builder: Any, value: Any) -> Any:
    """The sum of 16 lanes: halves onto each other until one is left."""
    for width in (8, 4, 2, 1):
        value = fold(builder, value, width)
    return builder.extract_element(value, ir.Constant(i32, 0))


@instruction(_float, (f32x16,))
def total(builder: Any, value: Any) -> Any:
    """The sum of all lanes, in the order of :func:`total_of`."""
    return total_of(builder, value)


@instruction(_float, (_int,))
def get(builder: Any, address: Any) -> Any:
    """One float32 at an address."""
    return builder.load(pointer(builder, address, f32), align=4)


@instruction(types.void, (_int, _float))
def put(builder: Any, address: Any, value: Any) -> None:
    """Write one float32."""
    builder.store(value, pointer(builder, address, f32), align=4)


@instruction(_int, (_int, _int))
def word(builder: Any, table: Any, index: Any) -> Any:
    """Entry ``index`` of a table of int64."""
    at = builder.add(table, builder.shl(index, ir.Constant(i64, 3)))
    return builder.load(pointer(builder, at, i64), align=8)


@instruction(_float, (_int, _int))
def real(builder: Any, table: Any, index: Any) -> Any:
    """Entry ``index`` of a table of int64 that holds a float32's bits."""
    at = builder.add(table, builder.shl(index, ir.Constant(i64, 3)))
    return builder.load(pointer(builder, at, f32), align=4)


@instruction(_int, (_int, _int))
def slot_at(builder: Any, table: Any, index: Any) -> Any:
    """Entry ``index`` of a table of int32."""
    at = builder.add(table, builder.shl(index, ir.Constant(i64, 2)))
    return builder.sext(builder.load(pointer(builder, at, i32), align=4), i64)
