"""The arithmetic of :mod:`recurra.engine.rows` on the CPU, a row at a time, in NumPy.

There NumPy's sort, partition, argmax and exp are vectorised, and torch's are not or cost more to call: for
50,280 entries on one core argmax takes 3.5 against 94 us, and the 1,024 largest 61 against 461 us.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: How far above the sure bound of top-p the first try is.
_FIRST_TRY = 32.0
#: Keeps the sure bound sure although sums are rounded.
_BELOW = 1.0 - 1e-6
#: Entries of a block in a two-level cumulative sum: a plain one in float64 costs ten times as much.
BLOCK = 512


class RowDrawer:
    """Draws from one row after another, with room that is made once.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._x = np.zeros(vocab_size, np.float32)
        self._mass = np.zeros_like(self._x)
        self._keep = np.zeros(vocab_size, np.bool_)

    def choose(
        self, logits: Floats, best: Floats, filters: tuple[NDArray[Any], ...], uniform: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """See :func:`recurra.engine.rows.choose`; ``filters`` are temperature, top_k, top_p, log_min_p."""
        columns = [best.tolist(), *(column.tolist() for column in filters), uniform.tolist()]
        drawn = [self.draw(row, *numbers) for row, *numbers in zip(logits, *columns, strict=True)]
        return np.array(drawn, np.int64)

    def draw(
        self,
        row: Floats,
        best: float,
        temperature: float,
        top_k: int,
        top_p: float,
        log_min_p: float,
        uniform: float,
    ) -> int:
        """Draw a token of one row."""
        if not math.isfinite(best):
            return 0  # nothing can be drawn; whoever asked sees it in ``best``
        x = self._x
        np.subtract(row, np.float32(best), out=x)
        if temperature != 1.0:
            np.divide(x, np.float32(temperature), out=x)
        floor = log_min_p
        if top_k < len(x):
            floor = max(floor, _largest(x, top_k))
        if floor > -math.inf:
            keep = np.greater_equal(x, np.float32(floor), out=self._keep)
            if _is_sparse(keep):
                return _draw_among(x, np.flatnonzero(keep), top_p, uniform)
            mass = np.exp(x, out=self._mass)
            np.multiply(mass, keep, out=mass)
        else:
            mass = np.exp(x, out=self._mass)
        if top_p < 1.0:
            keep = np.greater_equal(x, _nucleus(x, mass, top_p), out=self._keep)
            if _is_sparse(keep):
                ids = np.flatnonzero(keep)
                return int(ids[_first_above(mass[ids], uniform)])
            np.multiply(mass, keep, out=mass)
        return _first_above(mass, uniform)


def _is_sparse(keep: NDArray[np.bool_]) -> bool:
    """Few enough are kept that copying them out costs less than going on with all."""
    return int(np.count_nonzero(keep)) * 8 < len(keep)


def _draw_among(x: Floats, ids: NDArray[np.int64], top_p: float, uniform: float) -> int:
    """Draw one of a few tokens, given in order."""
    x = x[ids]
    mass = np.exp(x)
    if top_p < 1.0:
        kept = np.flatnonzero(x >= _nucleus(x, mass, top_p))
        ids, mass = ids[kept], mass[kept]
    return int(ids[_first_above(mass, uniform)])


def _nucleus(x: Floats, mass: Floats, top_p: float) -> np.float32:
    """Smallest of the largest entries of ``x`` whose ``mass`` first makes up ``top_p`` of the whole.

    By ``x``, not by mass: exp makes equals of entries that differ.
    """
    whole = float(_block_sums(mass)[-1])
    share = top_p * whole
    ordered = np.sort(_holding(x, mass, share, whole))[::-1]
    falling = np.exp(ordered)
    sums = _block_sums(falling)
    block = min(int(np.searchsorted(sums, share)), len(sums) - 1)
    inside = falling[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    place = int(np.searchsorted(inside, share - _before(sums, block)))
    found: np.float32 = ordered[block * BLOCK + min(place, len(inside) - 1)]
    return found


def _holding(x: Floats, mass: Floats, share: float, whole: float) -> Floats:
    """Few of the largest entries, but enough to make up ``share``; all where they can't be few.

    Entries of a mass below ``(whole - share) / n`` make up less than ``whole - share`` together, so that
    bound never cuts too deep. A higher one is tried first; whether it did shows in the sum.
    """
    bound = (whole - share) / len(mass)
    for factor in (_FIRST_TRY, _BELOW):
        possible = mass >= np.float32(bound * factor)
        if not _is_sparse(possible):
            break
        some: Floats = np.compress(possible, x)
        if factor is _BELOW or float(np.exp(some).sum(dtype=np.float64)) >= share:
            return some
    return x


def _largest(x: Floats, count: int) -> float:
    """The ``count``-th largest entry."""
    place = max(0, len(x) - count)
    return float(np.partition(x, place)[place])


def _block_sums(mass: Floats) -> NDArray[np.float64]:
    """Cumulative sums at the end of each block of ``BLOCK`` entries, the last one perhaps shorter."""
    whole = len(mass) // BLOCK * BLOCK
    sums: NDArray[np.float64] = mass[:whole].reshape(-1, BLOCK).sum(1, dtype=np.float64)
    if whole < len(mass):
        sums = np.append(sums, mass[whole:].sum(dtype=np.float64))
    return np.cumsum(sums)


def _before(sums: NDArray[np.float64], block: int) -> float:
    return float(sums[block - 1]) if block else 0.0


def _first_above(mass: Floats, uniform: float) -> int:
    """First place whose cumulative mass exceeds ``uniform`` of the whole; never one without mass."""
    sums = _block_sums(mass)
    target = min(uniform * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(np.searchsorted(sums, target, side="right"))
    inside = mass[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    # Sums in another order differ in their last bits, which could ask for more than the block has.
    rest = min(target - _before(sums, block), np.nextafter(inside[-1], 0.0))
    return block * BLOCK + int(np.searchsorted(inside, rest, side="right"))


def likeliest(row: Floats, count: int) -> NDArray[np.int64]:
    """Ids of the ``count`` largest entries, in order."""
    among = np.flatnonzero(row >= np.float32(_largest(row, count)))
    return among[np.argsort(-row[among], kind="stable")[:count]]
