"""Device functions that read and write states in any format (see :mod:`recurra.ops.rounding`), for any kernel.

A kernel that rounds to nearest reads with :func:`load_state` and writes with :func:`store_state` what it likes.
One that rounds by chance holds its rows in eight tiles, tile j the rows ``8 i + j``; all eight take their random
bits from one tile of draws::

    origin = draw_origin(seed, step, slot, LAYER)
    words = draw_words((h * groups + i)[:, None] * N + n[None, :], origin, ROUNDS)
    store_state(at + j * N, ok, scale_at + j, row_ok, value, half_word(words, j), FORMAT, True)  # j = 0 .. 7

``FORMAT`` and ``STOCHASTIC`` are compile-time constants, ``LAYER`` need not be.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import SCALED, check_state

#: Formats, as kernels name them. The two last of three 8-bit ones differ in who converts: the hardware, from
#: compute capability 8.9 on, or whole-number instructions. Their bits don't.
F32, BF16, F16, INT8, FP8, FP8_HARDWARE = range(6)
_INT8, _FP8, _FP8_HARDWARE = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(FP8_HARDWARE)
_BF16, _F16 = tl.constexpr(BF16), tl.constexpr(F16)

_FORMATS = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
}


def state_format(state: Tensor) -> int:
    """What a kernel takes as FORMAT for this state.

    Raises:
        ConfigError: a dtype that states aren't kept in.
    """
    chosen = _FORMATS.get(state.dtype, F32)
    if chosen == FP8 and state.is_cuda and torch.cuda.get_device_capability(state.device) >= (8, 9):
        return FP8_HARDWARE
    return chosen


def state_pointers(state: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """A state and its scales as kernels take them, and elements from one slot's scales to the next.

    Raises:
        ConfigError: a dtype that states aren't kept in.
    """
    check_state(state, scale)
    if state.dtype not in SCALED:
        return state, state, 0
    assert scale is not None
    assert scale[0].is_contiguous(), scale.stride()
    return state.view(torch.uint8), scale, scale.stride(0)


# --- draws ---------------------------------------------------------------------------------------


@triton.jit
def draw_origin(seed, step, slot, layer):
    """Key and counter of a sequence's draws, but for the place: five 32-bit numbers.

    Args:
        seed, step: addresses of int64.
        slot, layer: whole numbers.
    """
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    now = tl.load(step).to(tl.uint64, bitcast=True)
    high = (now >> 32).to(tl.uint32) & 0xFFFF
    return (
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
        slot.to(tl.uint32),
        now.to(tl.uint32),
        (high << 16) | layer.to(tl.uint32),
    )


@triton.jit
def draw_words(place, origin, ROUNDS: tl.constexpr):
    """128 random bits for each place of a tile: four tiles of words."""
    k0 = origin[0]
    k1 = origin[1]
    c0 = place.to(tl.uint32)
    c1 = tl.zeros_like(c0) + origin[2]
    c2 = tl.zeros_like(c0) + origin[3]
    c3 = tl.zeros_like(c0) + origin[4]
    for _ in tl.static_range(ROUNDS):
        high0 = tl.umulhi(c0, tl.full((), 0xD2511F53, tl.uint32))
        low0 = c0 * tl.full((), 0xD2511F53, tl.uint32)
        high1 = tl.umulhi(c2, tl.full((), 0xCD9E8D57, tl.uint32))
        low1 = c2 * tl.full((), 0xCD9E8D57, tl.uint32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def half_word(words, LANE: tl.constexpr):
    """The 16 bits of rows ``8 i + LANE``, as int32."""
    word = words[LANE // 2]
    word = (word & 0xFFFF) if LANE % 2 == 0 else (word >> 16)
    return word.to(tl.int32, bitcast=True)


# --- formats -------------------------------------------------------------------------------------


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_scale(value, FORMAT: tl.constexpr):
    """The scale of each row of a tile (rows, N), and what to multiply by instead of dividing by it.

    Columns past the row's end must be finite and no larger than the row; zeros will do.
    """
    largest = _bits(tl.reduce(tl.abs(value), 1, _larger))
    broken = (largest & 0x7FFFFFFF) > 0x7F7FFFFF  # infinities, and NaN of either sign
    largest = tl.where(broken, 0, largest)
    if FORMAT == _INT8:
        wide = _bits(_float(largest) * 0.007874015718698502)
        narrow = ((wide.to(tl.uint32, bitcast=True) + 0xFF00) & 0xFFFF0000).to(tl.int32, bitcast=True)
        scale = tl.maximum(_float(narrow), 7.888609052210118e-31)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        exponent = ((largest + 0x1FFFFF) & 0x7F800000) - 0x4000000
        exponent = tl.maximum(exponent, 0xD800000)
        scale = _float(exponent)
        inverse = _float(0x7F000000 - exponent)
    return tl.where(broken, float("nan"), scale), inverse


@triton.jit
def _f16_by_chance(value, noise):
    """13 bits of a unit in the last place added, away from zero, and the rest cut off.

    The product is exact: fused with the sum or not, the bits are the same.
    """
    share = _float((noise & 0x1FFF) | 0x3F800000) - 1.0
    unit = _float(tl.maximum(_bits(value) & 0x7F800000, 0x38800000))
    signed = _float(_bits(unit) | (_bits(value) & -0x80000000))
    return (value + share * signed).to(tl.float16, fp_downcast_rounding="rtz")


@triton.jit
def _fp8_by_chance(value, noise):
    """The e4m3 number, as float32, that noise of a unit in the last place leaves when the rest is cut off."""
    magnitude = tl.abs(value)
    offset = tl.where(magnitude < 0.015625, 0.015625, 0.0)
    cut = (_bits(magnitude + offset) + ((noise << 4) | 8)) & -0x100000
    return _float(_bits(_float(cut) - offset) | (_bits(value) & -0x80000000))


@triton.jit
def _fp8_code(value):
    """The byte of the e4m3 number nearest to one of at most 448."""
    magnitude = tl.abs(value)
    bits = _bits(magnitude)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the sum with 2^14 counts units, rounded once.
    code = tl.where(magnitude < 0.015625, _bits(magnitude + 16384.0), normal)
    return ((code & 0x7F) | ((_bits(value) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(value, inverse, noise, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """What is stored for a tile (rows, N) of float32.

    Args:
        inverse: (rows,), from :func:`row_scale`; read in 8-bit formats alone.
        noise: from :func:`half_word`, with STOCHASTIC.
    """
    if FORMAT == _INT8:
        # The minimum also keeps product and sum apart: fused they would round once, and the bits be others.
        scaled = tl.minimum(value * inverse[:, None], 127.0)
        if STOCHASTIC:
            scaled += _float(noise | 0x43000001) - 128.5
        stored = _bits(scaled + 12582912.0).to(tl.uint8)
    elif FORMAT >= _FP8:
        scaled = value * inverse[:, None]
        if STOCHASTIC:
            scaled = _fp8_by_chance(scaled, noise)
        stored = _fp8_code(scaled) if FORMAT == _FP8 else scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif FORMAT == _F16:
        stored = _f16_by_chance(value, noise) if STOCHASTIC else value.to(tl.float16)
    elif FORMAT == _BF16:
        if STOCHASTIC:
            cut = tl.where(value == value, _bits(value) + noise, 0x7FC00000)
            stored = (cut >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            stored = value.to(tl.bfloat16)
    else:
        stored = value
    return stored


@triton.jit
def decode(stored, scale, FORMAT: tl.constexpr):
    """A stored tile (rows, N) as float32; scale (rows,) float32, read in 8-bit formats alone."""
    if FORMAT == _INT8:
        # 2^23 + 128 + number, whose low byte is the number's with its sign bit turned over.
        biased = (stored.to(tl.int32) ^ 0x80) | 0x4B000000
        value = (_float(biased) - 8388736.0) * scale[:, None]
    elif FORMAT == _FP8:
        code = stored.to(tl.int32)
        half = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.int16)
        value = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0) * scale[:, None]
    elif FORMAT == _FP8_HARDWARE:
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    else:
        value = stored.to(tl.float32)
    return value


@triton.jit
def load_state(at, ok, scale_at, row_ok, FORMAT: tl.constexpr):
    """A tile of a state as float32, zeros outside.

    Args:
        at: (rows, N) addresses in what :func:`state_pointers` gave; ok: (rows, N) mask.
        scale_at: (rows,) addresses of the rows' scales; row_ok: (rows,) mask.
    """
    stored = tl.load(at, mask=ok, other=0)
    if FORMAT >= _INT8:
        scale = tl.load(scale_at, mask=row_ok, other=0.0).to(tl.float32)
        value = tl.where(ok, decode(stored, scale, FORMAT), 0.0)
    else:
        value = decode(stored, 0.0, FORMAT)
    return value


@triton.jit
def store_state(
    at, ok, scale_at, row_ok, value, noise, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr
):  # fmt: skip
    """Round a tile of float32 and write it, with its scales; it must hold whole rows in 8-bit formats.

    Args:
        at, ok, scale_at, row_ok: as in :func:`load_state`; value must be zero in columns outside.
        noise: from :func:`half_word`; any number without STOCHASTIC.
    """
    inverse = value
    if FORMAT >= _INT8:
        scale, inverse = row_scale(value, FORMAT)
        tl.store(scale_at, scale.to(tl.bfloat16), mask=row_ok)
    tl.store(at, encode(value, inverse, noise, FORMAT, STOCHASTIC), mask=ok)


def draw_arguments(rounding: Any, state: Tensor) -> tuple[Tensor, Tensor, int]:
    """Seed, step and layer as kernels take them; any tensor of the device stands in when nothing is drawn."""
    if not rounding.stochastic:
        return state, state, 0
    assert rounding.seed.device == state.device, f"seed on {rounding.seed.device}, states on {state.device}"
    return rounding.seed, rounding.step, rounding.layer
