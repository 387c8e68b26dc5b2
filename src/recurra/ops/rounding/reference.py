"""The definition of :mod:`recurra.ops.rounding` in plain PyTorch, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recurra.ops.rounding import GROUP, SCALE_DTYPE, SCALED, Rounding

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LARGEST_FINITE = 0x7F7FFFFF
_SMALLEST_SCALE = 2.0**-100
#: Added to float32 bits before they are cut to bfloat16: up, unless that is a rounding error above a number that
#: fits: a row that reads back as 127 scales is given the same scale again.
_UP = 0xFF00


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a product of 32-bit numbers held in int64, which would overflow whole."""
    upper = a * (b >> 16) + ((a * (b & 0xFFFF)) >> 16)
    lower = (((a * (b >> 16)) & 0xFFFF) << 16) + a * (b & 0xFFFF)
    return (upper >> 16) & _WORD, lower & _WORD


def philox(counter: tuple[Tensor, ...], seed: Tensor, rounds: int) -> tuple[Tensor, ...]:
    """Philox 4x32: four words, as int64 tensors of 32-bit numbers, from four of the same."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def draws(rounding: Rounding, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The 16 random bits of every element of states ``shape = (..., R, N)``: (S, *shape) int64.

    Args:
        slots: (S,) whose states are stored.
    """
    rows, size = shape[-2:]
    heads, groups, device = math.prod(shape[:-2]), -(-rows // GROUP), slots.device
    place = torch.arange(heads * groups * size, device=device).view(1, heads, groups, size)
    step = rounding.step.to(device)
    fixed = (step & _WORD, rounding.layer + (((step >> 32) & 0xFFFF) << 16))
    everywhere = torch.zeros_like(place).expand(slots.shape[0], -1, -1, -1)
    counter = (
        everywhere + place,
        everywhere + slots.long().view(-1, 1, 1, 1),
        *(everywhere + c for c in fixed),
    )
    words = philox(counter, rounding.seed.to(device), rounding.rounds)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    grouped = torch.stack(halves, dim=3)  # (S, heads, groups, GROUP, N)
    return grouped.flatten(2, 3)[:, :, :rows].reshape(-1, *shape)


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def row_scale(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale of each row of a float32 value, and what to multiply by instead of dividing: (..., R) float32."""
    largest = _bits(value).bitwise_and(0x7FFFFFFF).amax(-1)
    if dtype == torch.int8:
        step = torch.tensor(1.0 / 127.0, dtype=torch.float32)
        narrow = (_bits(_floats(largest) * step.to(value.device)).long() + _UP) & 0xFFFF0000
        scale = _floats(narrow).clamp(min=_SMALLEST_SCALE)
        inverse = 1.0 / scale
    else:
        smallest = (127 - 100) << 23
        exponent = (((largest.long() + 0x1FFFFF) & 0x7F800000) - (8 << 23)).clamp(min=smallest)
        scale, inverse = _floats(exponent), _floats((254 << 23) - exponent)
    return torch.where(largest > _LARGEST_FINITE, float("nan"), scale), inverse


def _f16_by_chance(value: Tensor, noise: Tensor) -> Tensor:
    """13 bits of a unit in the last place added, away from zero, and the rest cut off."""
    exponent = _floats((_bits(value) & 0x7F800000).clamp(min=0x38800000))
    moved = value + (noise & 0x1FFF).float() * 2.0**-23 * torch.copysign(exponent, value)
    nearest = moved.to(torch.float16)
    # Patterns are signed magnitudes: one less is the next number towards zero, below infinity too.
    return (nearest.view(torch.int16) - (nearest.float().abs() > moved.abs()).short()).view(torch.float16)


def _fp8_by_chance(value: Tensor, noise: Tensor) -> Tensor:
    """The e4m3 number, as float32, that 16 bits of a unit leave when the rest is cut off.

    Below 2^-6, the smallest normal number, units are as long as above it: there 2^-6 is added, and taken again.
    """
    magnitude = value.abs()
    offset = torch.where(magnitude < 2.0**-6, 2.0**-6, 0.0)
    cut = (_bits(magnitude + offset) + ((noise << 4) | 8)) & -(1 << 20)
    return torch.copysign(_floats(cut) - offset, value)


def encode(value: Tensor, dtype: torch.dtype, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round a float32 value (..., R, N).

    Args:
        noise: 16 random bits for each element, or None for the nearest number.

    Returns:
        what is stored in ``dtype``, and the scales (..., R), empty where the format has none.
    """
    if dtype in SCALED:
        scale, inverse = row_scale(value, dtype)
        value = value * inverse[..., None]
        return _encode_scaled(value, dtype, noise), scale.to(SCALE_DTYPE)
    none = value.new_empty(0)
    if noise is None or dtype.itemsize > 2:
        return value.to(dtype), none
    if dtype == torch.float16:
        return _f16_by_chance(value, noise), none
    cut = _floats((_bits(value).long() + noise) & 0xFFFF0000)
    return torch.where(value == value, cut, value).to(dtype), none


def _encode_scaled(value: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    value = torch.where(torch.isfinite(value), value, 0.0)  # its row has no scale to be read by
    if dtype == torch.int8:
        # Integers lie as close on both sides: there half a unit either way and the nearest will do.
        share = 0.0 if noise is None else ((noise | 1) - 2**15).float() * 2.0**-16
        return (value.clamp(max=127.0) + share).round().to(dtype)
    return (value if noise is None else _fp8_by_chance(value, noise)).to(dtype)


def load(state: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """States by slot, widened to ``dtype``: (S, ..., R, N)."""
    index = slots.long()
    value = state[index].to(dtype)
    return value * scale[index].to(dtype)[..., None] if scale is not None and scale.numel() else value


def store(state: Tensor, scale: Tensor | None, slots: Tensor, value: Tensor, rounding: Rounding) -> None:
    """Round states (S, ..., R, N) and write them by slot, with their scales."""
    index = slots.long()
    if state.dtype.itemsize >= 4 or (state.dtype not in SCALED and not rounding.stochastic):
        state[index] = value.to(state.dtype)
        return
    noise = draws(rounding, slots, tuple(state.shape[1:])) if rounding.stochastic else None
    stored, scales = encode(value.float(), state.dtype, noise)
    state.view(torch.uint8)[index] = stored.view(torch.uint8)
    if state.dtype in SCALED:
        assert scale is not None
        scale[index] = scales
