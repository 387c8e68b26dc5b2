"""Rotary positions: pairs of a query's or key's values turned by an angle that grows with the position.

``(a, b) -> (a cos t - b sin t, a sin t + b cos t)`` with ``t = position * frequency`` and one frequency a pair.
Sources: RoFormer (Su et al., 2021); the ways to stretch the frequencies over longer texts: linear (Chen et al.,
2023), YaRN (Peng et al., 2023), Llama 3's (Meta, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotarySizes:
    """Which values turn, and how fast.

    Attributes:
        dim: values of a head that turn, the first ones; even.
        frequencies: dim / 2 of them, radians a position.
        scale: of the turned values (YaRN's attention factor).
        interleaved: pairs are neighbours; else the first half pairs with the second.
    """

    dim: int
    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


class Rotary:
    """Turns queries and keys of one model; frequencies live on its device.

    Args:
        sizes: which values, and how fast.
        device: where positions come from.
    """

    def __init__(self, sizes: RotarySizes, device: torch.device) -> None:
        self.sizes = sizes
        self._frequencies = torch.tensor(sizes.frequencies, dtype=torch.float32, device=device)

    def __call__(self, positions: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            positions: (T,) int64.
            values: (T, heads, dim or more) each; what is beyond ``dim`` passes unchanged.

        Returns:
            tensors of the same shapes and dtypes; float32 (float64 if they are) inside.
        """
        wide = torch.float64 if values[0].dtype == torch.float64 else torch.float32
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos = (angles.cos() * self.sizes.scale).to(wide)[:, None, :]
        sin = (angles.sin() * self.sizes.scale).to(wide)[:, None, :]
        return tuple(self._turn(value, cos, sin) for value in values)

    def _turn(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = self.sizes.dim
        turning = value[..., :dim].to(cos.dtype)
        if self.sizes.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        if dim == value.shape[-1]:
            return turned.to(value.dtype)
        return torch.cat((turned.to(value.dtype), value[..., dim:]), dim=-1)


def plain(dim: int, theta: float) -> Tensor:
    """``theta^(-2 i / dim)``, (dim / 2,) float32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def linear(dim: int, theta: float, factor: float) -> Tensor:
    """Positions ``factor`` times closer."""
    return plain(dim, theta) / factor


def llama3(
    dim: int, theta: float, factor: float, low_factor: float, high_factor: float, original: float
) -> Tensor:
    """Slow turns stretched by ``factor``, fast ones kept, those between blended.

    Args:
        low_factor, high_factor: turns within the ``original`` length that count as slow and as fast.
        original: positions of the training before stretching.
    """
    base = plain(dim, theta)
    turns = original * base / (2 * math.pi)
    blend = ((turns - low_factor) / (high_factor - low_factor)).clamp(0, 1)
    return base * blend + base / factor * (1 - blend)


def yarn(
    dim: int,
    theta: float,
    factor: float,
    original: float,
    *,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Slow turns stretched by ``factor``, fast ones kept, in between a ramp over the pair's number.

    Args:
        original: positions of the training before stretching.
        fast, slow: turns within ``original`` at the ramp's two ends.
        truncate: round the ramp's ends outwards to whole pairs.
    """

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    base = plain(dim, theta)
    return base / factor * ramp + base * (1 - ramp)


def yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's factor of the turned values, from the stretch."""

    def one(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return one(mscale) / one(mscale_all_dim) if mscale and mscale_all_dim else one(1.0)
