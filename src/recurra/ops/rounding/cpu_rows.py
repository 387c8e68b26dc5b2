"""Rows of a state between their stored format and float32, sixteen lanes at a time (see :mod:`recurra.ops.rounding`).

Words and codes of numbers are whole numbers of 32 bits in the lanes of the vector type, whose instructions here
reinterpret them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from recurra.ops.cpu.jit import address, declare, f16, f32, i16, i32, i64, instruction, kernel, pointer
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    BF16,
    F16,
    F32,
    LANES,
    f32x16,
    first_lanes,
    fma_of,
    get,
    ivec,
    load_bf16,
    load_bf16_first,
    load_f16,
    load_f16_first,
    mask,
    mul,
    put,
    splat,
    splat_of,
    vec,
    where_less,
    word,
)

#: Formats beside those of matrices.
FP8, INT8 = 3, 4

_int = types.int64
_i8 = ir.IntType(8)
_wide = ir.VectorType(i64, LANES)
_shorts, _bytes, _halves = (ir.VectorType(kind, LANES) for kind in (i16, _i8, f16))

# Words of the table that says how to round: no rounds means nearest.
ROUNDS, KEY_LOW, KEY_HIGH, STEP, LAYER = range(5)

# Words of the table of a narrow state: see :func:`stored_words` in ``cpu``.
KIND, OPEN_ROWS, CLOSE_ROWS, CHANCE, SCALES, SCALE_SLOT = range(6)

#: Rows that :func:`open_block` and :func:`close_block` are given at most, and float32 that they need beside them.
BLOCK_ROWS, SPARE = 16, 32
_WORD = 0xFFFFFFFF


def _all(value: int, kind: Any = ivec) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _same(value: float) -> Any:
    return ir.Constant(vec, [value] * LANES)


def _bits(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, ivec)


def _lanes(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, vec)


# --- draws ---------------------------------------------------------------------------------------


@instruction(f32x16, (_int,))
def _counting(builder: Any, first: Any) -> Any:
    """first, first + 1, ... in the lanes."""
    start = splat_of(builder, builder.trunc(first, i32), ivec)
    return _lanes(builder, builder.add(start, ir.Constant(ivec, list(range(LANES)))))


@instruction(f32x16, (_int,))
def _whole(builder: Any, value: Any) -> Any:
    """One whole number in every lane."""
    return _lanes(builder, splat_of(builder, builder.trunc(value, i32), ivec))


@instruction(f32x16, (f32x16, _int))
def _high(builder: Any, a: Any, b: Any) -> Any:
    """Upper half of the product of unsigned numbers."""
    product = builder.mul(builder.zext(_bits(builder, a), _wide), splat_of(builder, b, _wide))
    return _lanes(builder, builder.trunc(builder.lshr(product, _all(32, _wide)), ivec))


@instruction(f32x16, (f32x16, _int))
def _low(builder: Any, a: Any, b: Any) -> Any:
    """Lower half of the product."""
    return _lanes(builder, builder.mul(_bits(builder, a), splat_of(builder, builder.trunc(b, i32), ivec)))


@instruction(f32x16, (f32x16, f32x16, _int))
def _mixed(builder: Any, a: Any, b: Any, key: Any) -> Any:
    """a ^ b ^ key"""
    both = builder.xor(_bits(builder, a), _bits(builder, b))
    return _lanes(builder, builder.xor(both, splat_of(builder, builder.trunc(key, i32), ivec)))


@instruction(f32x16, (f32x16, _int))
def _half(builder: Any, words: Any, upper: Any) -> Any:
    """The lower or the upper 16 bits of words."""
    shift = splat_of(builder, builder.trunc(builder.mul(upper, ir.Constant(i64, 16)), i32), ivec)
    return _lanes(builder, builder.and_(builder.lshr(_bits(builder, words), shift), _all(0xFFFF)))


@kernel
def _draw(chance: int, slot: int, place: int) -> Any:
    """Four vectors of words: the draws of 16 places."""
    k0, k1 = word(chance, KEY_LOW), word(chance, KEY_HIGH)
    c0, c1 = _counting(place), _whole(slot)
    c2, c3 = _whole(word(chance, STEP)), _whole(word(chance, LAYER))
    for _ in range(word(chance, ROUNDS)):
        d0, d2 = _mixed(_high(c2, 0xCD9E8D57), c1, k0), _mixed(_high(c0, 0xD2511F53), c3, k1)
        c1, c3 = _low(c2, 0xCD9E8D57), _low(c0, 0xD2511F53)
        c0, c2 = d0, d2
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


# --- float32 to codes ----------------------------------------------------------------------------


def _keep_nan(builder: Any, x: Any, code: Any, nan: int) -> Any:
    return builder.select(builder.fcmp_unordered("uno", x, x), _all(nan), code)


def _abs(builder: Any, x: Any) -> Any:
    return _lanes(builder, builder.and_(_bits(builder, x), _all(0x7FFFFFFF)))


def _f16_code(builder: Any, x: Any) -> Any:
    return builder.zext(builder.bitcast(builder.fptrunc(x, _halves), _shorts), ivec)


@instruction(f32x16, (f32x16,))
def _bf16_nearest(builder: Any, x: Any) -> Any:
    bits = _bits(builder, x)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    up = builder.add(builder.add(bits, _all(0x7FFF)), odd)
    return _lanes(builder, _keep_nan(builder, x, builder.lshr(up, _all(16)), 0x7FC0))


@instruction(f32x16, (f32x16, f32x16))
def _bf16_chance(builder: Any, x: Any, noise: Any) -> Any:
    up = builder.add(_bits(builder, x), _bits(builder, noise))
    return _lanes(builder, _keep_nan(builder, x, builder.lshr(up, _all(16)), 0x7FC0))


@instruction(f32x16, (f32x16,))
def _f16_nearest(builder: Any, x: Any) -> Any:
    return _lanes(builder, _f16_code(builder, x))


@instruction(f32x16, (f32x16, f32x16))
def _f16_chance(builder: Any, x: Any, noise: Any) -> Any:
    """13 bits of a unit in the last place added, away from zero, and the rest cut off."""
    bits, sign = _bits(builder, x), _all(-0x80000000)
    exponent = builder.and_(bits, _all(0x7F800000))
    larger = builder.icmp_signed(">", exponent, _all(0x38800000))
    unit = builder.select(larger, exponent, _all(0x38800000))
    signed = _lanes(builder, builder.or_(unit, builder.and_(bits, sign)))
    part = builder.or_(builder.and_(_bits(builder, noise), _all(0x1FFF)), _all(0x3F800000))
    share = builder.fsub(_lanes(builder, part), _same(1.0))
    moved = fma_of(builder, share, signed, x)  # the product is exact
    nearest = builder.fptrunc(moved, _halves)
    away = builder.fcmp_ordered(">", _abs(builder, builder.fpext(nearest, vec)), _abs(builder, moved))
    code = builder.zext(builder.bitcast(nearest, _shorts), ivec)
    return _lanes(builder, builder.sub(code, builder.zext(away, ivec)))


@instruction(f32x16, (f32x16, f32x16))
def _fp8_chance(builder: Any, x: Any, noise: Any) -> Any:
    """16 bits of a unit in the last place added, and the rest cut off (see the reference)."""
    magnitude = _abs(builder, x)
    small = builder.fcmp_ordered("<", magnitude, _same(2.0**-6))
    shifted = builder.fadd(magnitude, builder.select(small, _same(2.0**-6), _same(0.0)))
    bits = builder.or_(builder.shl(_bits(builder, noise), _all(4)), _all(8))
    code = builder.lshr(builder.add(_bits(builder, shifted), bits), _all(20))
    code = builder.sub(code, builder.select(small, _all(968), _all(960)))
    sign = builder.and_(builder.lshr(_bits(builder, x), _all(24)), _all(0x80))
    return _lanes(builder, builder.or_(builder.and_(code, _all(0x7F)), sign))


@instruction(f32x16, (f32x16, f32x16))
def _int8_dither(builder: Any, x: Any, noise: Any) -> Any:
    """Within one half."""
    part = builder.or_(_bits(builder, noise), _all(0x43000001))
    return builder.fadd(x, builder.fsub(_lanes(builder, part), _same(128.5)))


@instruction(f32x16, (f32x16,))
def _fp8_nearest(builder: Any, x: Any) -> Any:
    """The byte of a number of at most 448; below 2^-6 the sum with 2^14 counts units, rounded once."""
    magnitude = _abs(builder, x)
    bits = _bits(builder, magnitude)
    odd = builder.and_(builder.lshr(bits, _all(20)), _all(1))
    up = builder.lshr(builder.add(builder.add(bits, _all(0x7FFFF)), odd), _all(20))
    units = _bits(builder, builder.fadd(magnitude, _same(16384.0)))
    small = builder.fcmp_ordered("<", magnitude, _same(2.0**-6))
    code = builder.and_(builder.select(small, units, builder.sub(up, _all(960))), _all(0x7F))
    sign = builder.and_(builder.lshr(_bits(builder, x), _all(24)), _all(0x80))
    return _lanes(builder, builder.or_(code, sign))


@instruction(f32x16, (f32x16,))
def _int8_nearest(builder: Any, x: Any) -> Any:
    return builder.fadd(x, _same(12582912.0))


def _write(builder: Any, at: Any, codes: Any, kind: Any, name: str, align: int, count: Any) -> None:
    narrow = builder.trunc(_bits(builder, codes), kind)
    store = declare(
        builder, f"llvm.masked.store.v16{name}.p0", ir.VoidType(), [kind, kind.as_pointer(), i32, mask]
    )
    chosen = first_lanes(builder, count)
    builder.call(store, [narrow, pointer(builder, at, kind), ir.Constant(i32, align), chosen])


@instruction(types.void, (_int, f32x16, _int))
def _write_16(builder: Any, at: Any, codes: Any, count: Any) -> None:
    """The lower halves of the first ``count`` codes."""
    _write(builder, at, codes, _shorts, "i16", 2, count)


@instruction(types.void, (_int, f32x16, _int))
def _write_8(builder: Any, at: Any, codes: Any, count: Any) -> None:
    """Their lowest bytes."""
    _write(builder, at, codes, _bytes, "i8", 1, count)


# --- codes to float32 ----------------------------------------------------------------------------


@instruction(f32x16, (_int, _int))
def _read_8(builder: Any, at: Any, count: Any) -> Any:
    """The first ``count`` bytes as whole numbers, zeros elsewhere."""
    read = declare(builder, "llvm.masked.load.v16i8.p0", _bytes, [_bytes.as_pointer(), i32, mask, _bytes])
    chosen = first_lanes(builder, count)
    arguments = [pointer(builder, at, _bytes), ir.Constant(i32, 1), chosen, _all(0, _bytes)]
    return _lanes(builder, builder.zext(builder.call(read, arguments), ivec))


@instruction(f32x16, (f32x16,))
def _int8_value(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.trunc(_bits(builder, codes), _bytes), vec)


@instruction(f32x16, (f32x16,))
def _fp8_value(builder: Any, codes: Any) -> Any:
    """Through float16, whose exponents are 8 less: its subnormal numbers are exact in any mode."""
    bits = _bits(builder, codes)
    size = builder.shl(builder.and_(bits, _all(0x7F)), _all(7))
    sign = builder.shl(builder.and_(bits, _all(0x80)), _all(8))
    half = builder.bitcast(builder.trunc(builder.or_(size, sign), _shorts), _halves)
    return builder.fmul(builder.fpext(half, vec), _same(256.0))


@kernel
def _read(kind: int, at: int, count: int) -> Any:
    """Up to 16 stored numbers, before their scale."""
    if kind == F32:
        return load_some(at, count)
    if kind == BF16:
        return load_bf16(at) if count >= LANES else load_bf16_first(at, count)
    if kind == F16:
        return load_f16(at) if count >= LANES else load_f16_first(at, count)
    if kind == FP8:
        return _fp8_value(_read_8(at, count))
    return _int8_value(_read_8(at, count))


# --- scales --------------------------------------------------------------------------------------


@instruction(f32x16, (f32x16, f32x16))
def _larger(builder: Any, most: Any, x: Any) -> Any:
    """The larger magnitude, as bit patterns: NaN is above all."""
    a, b = _bits(builder, most), builder.and_(_bits(builder, x), _all(0x7FFFFFFF))
    return _lanes(builder, builder.select(builder.icmp_signed(">", a, b), a, b))


@instruction(_int, (f32x16,))
def _largest(builder: Any, most: Any) -> Any:
    """The largest lane."""
    bits = _bits(builder, most)
    largest = builder.extract_element(bits, ir.Constant(i32, 0))
    for lane in range(1, LANES):
        other = builder.extract_element(bits, ir.Constant(i32, lane))
        largest = builder.select(builder.icmp_signed(">", largest, other), largest, other)
    return builder.sext(largest, i64)


@instruction(types.float32, (_int,))
def _float_of(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, i32), f32)


@instruction(_int, (types.float32,))
def _bits_of(builder: Any, x: Any) -> Any:
    return builder.zext(builder.bitcast(x, i32), i64)


@instruction(types.void, (_int, _int))
def _put_short(builder: Any, at: Any, value: Any) -> None:
    builder.store(builder.trunc(value, i16), pointer(builder, at, i16), align=2)


@instruction(types.float32, (_int,))
def _scale_at(builder: Any, at: Any) -> Any:
    short = builder.load(pointer(builder, at, i16), align=2)
    return builder.bitcast(builder.shl(builder.zext(short, i32), ir.Constant(i32, 16)), f32)


@kernel
def _put_scale(kind: int, source: int, N: int, scale: int, inverse: int) -> None:
    """Choose a row's scale: write it, and what to multiply by (see the reference's ``row_scale``)."""
    most = splat(0.0)
    for n in range(0, N, LANES):
        most = _larger(most, load_some(source + 4 * n, N - n))
    largest = _largest(most)
    if kind == INT8:
        step = _bits_of(_float_of(largest) * np.float32(1.0 / 127.0))
        bits = max((step + 0xFF00) & 0xFFFF0000, (127 - 100) << 23)
        put(inverse, np.float32(1.0) / _float_of(bits))
    else:
        bits = max(((largest + 0x1FFFFF) & 0x7F800000) - (8 << 23), (127 - 100) << 23)
        put(inverse, _float_of((254 << 23) - bits))
    _put_short(scale, 0x7FC0 if largest > 0x7F7FFFFF else bits >> 16)


# --- rows ----------------------------------------------------------------------------------------


@kernel
def element_bytes(kind: int) -> int:
    """Bytes of a stored number."""
    return 4 if kind == F32 else (2 if kind <= F16 else 1)


@kernel
def _nearest(kind: int, at: int, x: Any, count: int) -> None:
    if kind == BF16:
        _write_16(at, _bf16_nearest(x), count)
    elif kind == F16:
        _write_16(at, _f16_nearest(x), count)
    elif kind == FP8:
        _write_8(at, _fp8_nearest(x), count)
    elif kind == INT8:
        _write_8(at, _int8_nearest(where_less(x, splat(127.0), x, splat(127.0))), count)
    else:
        store_some(at, x, count)


@kernel
def _by_chance(kind: int, at: int, x: Any, noise: Any, count: int) -> None:
    if kind == BF16:
        _write_16(at, _bf16_chance(x, noise), count)
    elif kind == F16:
        _write_16(at, _f16_chance(x, noise), count)
    elif kind == FP8:
        _write_8(at, _fp8_chance(x, noise), count)
    elif kind == INT8:
        x = where_less(x, splat(127.0), x, splat(127.0))
        _write_8(at, _int8_nearest(_int8_dither(x, noise)), count)
    else:
        store_some(at, x, count)


@kernel
def _row_noise(w0: Any, w1: Any, w2: Any, w3: Any, lane: int) -> Any:
    """The 16 bits of row ``lane`` of a group."""
    if lane < 2:
        return _half(w0, lane)
    if lane < 4:
        return _half(w1, lane - 2)
    if lane < 6:
        return _half(w2, lane - 4)
    return _half(w3, lane - 6)


def open_rows(kind: int, state: int, scale: int, rows: int, N: int, out: int) -> None:
    """Widen rows of N stored numbers into float32."""
    size = element_bytes(kind)
    for r in range(rows):
        factor = splat(_scale_at(scale + 2 * r) if kind >= FP8 else np.float32(1.0))
        for n in range(0, N, LANES):
            x = _read(kind, state + size * (r * N + n), N - n)
            if kind >= FP8:
                x = mul(x, factor)
            store_some(out + 4 * (r * N + n), x, N - n)


def close_rows(
    kind: int, state: int, scale: int, rows: int, N: int, source: int, chance: int, slot: int, place: int,
    spare: int,
) -> None:  # fmt: skip
    """Round float32 rows into a state, and choose their scales.

    Args:
        kind: F32, BF16, F16, FP8 or INT8.
        state, scale: addresses of the first row and of its scale; its number in its head is a multiple of 8.
        chance: address of a table of words (ROUNDS, KEY_LOW, KEY_HIGH, STEP, LAYER).
        slot, place: of the draws; the place of the first row's first element.
        spare: address of 8 float32.
    """
    size, rounds = element_bytes(kind), word(chance, ROUNDS)
    for first in range(0, rows, 8):
        left = min(8, rows - first)
        if kind >= FP8:
            for j in range(left):
                row = first + j
                _put_scale(kind, source + 4 * row * N, N, scale + 2 * row, spare + 4 * j)
        for n in range(0, N, LANES):
            w0, w1, w2, w3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
            if rounds:
                w0, w1, w2, w3 = _draw(chance, slot, place + first // 8 * N + n)
            for j in range(left):
                at = (first + j) * N + n
                x = load_some(source + 4 * at, N - n)
                if kind >= FP8:
                    x = mul(x, splat(get(spare + 4 * j)))
                if rounds:
                    _by_chance(kind, state + size * at, x, _row_noise(w0, w1, w2, w3, j), N - n)
                else:
                    _nearest(kind, state + size * at, x, N - n)


OPEN = types.void(*(_int,) * 6)
CLOSE = types.void(*(_int,) * 10)


def addresses() -> tuple[int, int]:
    """Addresses of the compiled :func:`open_rows` and :func:`close_rows`."""
    return address(open_rows, OPEN), address(close_rows, CLOSE)


def _call(builder: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [i64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), list(arguments))


@instruction(types.void, (_int,) * 7)
def call_open(builder: Any, function: Any, *arguments: Any) -> None:
    """Call :func:`open_rows` by its address."""
    _call(builder, function, arguments)


@instruction(types.void, (_int,) * 11)
def call_close(builder: Any, function: Any, *arguments: Any) -> None:
    """Call :func:`close_rows` by its address."""
    _call(builder, function, arguments)


@kernel
def open_block(stored: int, at: int, slot: int, row: int, rows: int, N: int, work: int) -> None:
    """Widen up to 16 rows of a slot's state.

    Args:
        stored: address of the table of the state's words.
        at: address of the slot's first number; row: the first of the rows, counted over all heads.
        work: address of ``SPARE`` float32 and then the rows.
    """
    kind = word(stored, KIND)
    scale = word(stored, SCALES) + slot * word(stored, SCALE_SLOT) + 2 * row
    call_open(
        word(stored, OPEN_ROWS), kind, at + element_bytes(kind) * row * N, scale, rows, N, work + 4 * SPARE
    )  # fmt: skip


@kernel
def close_block(stored: int, at: int, slot: int, row: int, rows: int, N: int, work: int, place: int) -> None:
    """Round the rows back; ``place`` is that of the first one's draws. Its number in its head is a multiple of 8."""
    kind = word(stored, KIND)
    scale = word(stored, SCALES) + slot * word(stored, SCALE_SLOT) + 2 * row
    call_close(
        word(stored, CLOSE_ROWS), kind, at + element_bytes(kind) * row * N, scale, rows, N, work + 4 * SPARE,
        word(stored, CHANCE), slot, place, work,
    )  # fmt: skip
