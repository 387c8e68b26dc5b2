"""States in fewer bits: formats, scales, and rounding to nearest or by chance. One definition for all backends.

A state is ``(slots, ..., R, N)``: rows of N numbers, in float32, bfloat16, float16, float8_e4m3fn or int8. In
the two 8-bit formats each row has a scale, ``(slots, ..., R)`` bfloat16, and ``number = stored * scale``.

**Scales**, from a row's largest magnitude m:

* fp8: the power of two with ``m / scale`` in (224, 448], so that dividing by it is exact;
* int8: ``m / 127``, rounded up to bfloat16.

No scale is below 2^-100. A row with a NaN or an infinity has a NaN for a scale: all of it reads as NaN.
Finite numbers never make one, and below 3e38 none overflows.

**Nearest** is ties to even.

**Stochastic** adds a random part of a unit in the last place to the magnitude and cuts off what the format can't
hold, so that a number goes up as often as it is far up, and one that fits stays. Random numbers r have 16 bits;
float16 takes the lower 13, which is all that it drops. Numbers below the smallest normal one have its unit. (int8,
whose units are all alike, adds r - 1/2 of one and takes the nearest: the same.) Past 65,504 a finite number
stays there in float16; in bfloat16 it may become infinite from 3.39e38 on, as it does to nearest.

**Draws.** Philox 4x32 (Salmon et al., 2011) with the seed as key gives 128 bits, which eight numbers share:
the draw of counter

    (place, slot, step mod 2^32, layer + 2^16 * (step / 2^32))       place = (h * ceil(R / 8) + r // 8) * N + n

serves the elements n of the rows 8 (r // 8) to 8 (r // 8) + 7 of head h (the dimensions before R, flattened):
row r takes the 16 bits ``r % 8``, the lower half of each word first. Neighbours *down* the rows share it, so that
one vector of draws meets eight vectors of numbers with no lane ever moving.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.rounding import NEAREST, SCALE_DTYPE, SCALED, Rounding, stochastic

__all__ = ["GROUP", "NEAREST", "SCALED", "SCALE_DTYPE", "Rounding", "check_state", "stochastic"]

#: Rows that share a draw.
GROUP = 8

_STORED = (torch.float32, torch.bfloat16, torch.float16, *SCALED)


def check_state(state: Tensor, scale: Tensor | None) -> None:
    """Hold a state and its scales to this module's format.

    Raises:
        ConfigError: a format that no kernel stores.
    """
    if state.dtype not in _STORED:
        raise ConfigError(
            "mamba_ssm_cache_dtype", str(state.dtype).removeprefix("torch."), "states can't be kept in this dtype.",
            'Use "float32", "bfloat16", "float16", "fp8" or "int8".',
        )  # fmt: skip
    if state.dtype in SCALED:
        assert scale is not None, f"{state.dtype} states need their scales"
        assert scale.dtype == SCALE_DTYPE, scale.dtype
        assert scale.shape == state.shape[:-1], (scale.shape, state.shape)
