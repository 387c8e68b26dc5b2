"""Random numbers that depend on a request alone: its seed, which answer it is, and the token's place.

A stream is a counter run through a mixing function (the finaliser of SplitMix64; Steele, Lea and
Flood, 2014), so a number needs no state and no neighbour in the batch can shift it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(s) for s in (30, 27, 31, 11))


def answer_seed(seed: int, index: int) -> int:
    """Seed of a request's answer ``index``: answer i of seed s is the first answer of seed s + i."""
    return (seed + index) & _MASK


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """(R,) float64 in [0, 1), one for each row's (seed, position of the token in its answer)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (mixed >> _S11).astype(np.float64) * 2.0**-53
