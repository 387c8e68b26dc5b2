"""What both attention kernels share: where a position is, the scores' bound, and the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from recurra.ops.triton_math import decay_of


@triton.jit
def rows_of(table, position, ok, PAGE: tl.constexpr):
    """Rows of the flattened cache that hold positions; row 0 where not ``ok``."""
    page = tl.load(table + position // PAGE, mask=ok, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def tanh(x):
    """To float32's last digits, near 0 too: (1 - e) / (1 + e) with e = exp(-2 |x|), 1 - e by its series where small."""
    y = 2.0 * tl.abs(x)
    e = decay_of(-y)
    series = 1.0 / 5040.0
    series = series * y - 1.0 / 720.0
    series = series * y + 1.0 / 120.0
    series = series * y - 1.0 / 24.0
    series = series * y + 1.0 / 6.0
    series = series * y - 1.0 / 2.0
    series = (series * y + 1.0) * y
    t = tl.where(y < 0.5, series, 1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def bounded(scores, scale, softcap, CAPPED: tl.constexpr):
    """``scale * scores``, perhaps through ``softcap * tanh(. / softcap)``."""
    scores *= scale
    if CAPPED:
        scores = softcap * tanh(scores / softcap)
    return scores


@triton.jit
def absorb(scores, values, most, whole, acc, PRECISION: tl.constexpr):
    """One more block of keys: scores (rows, keys), -infinity where unseen, and values (keys, V).

    The largest score is taken off before anything is multiplied, so that what rounding does to large scores
    isn't made larger.
    """
    found = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(found == float("-inf"), 0.0, found)  # of a row that has seen nothing yet
    weights = tl.exp(scores - base[:, None])
    keep = tl.exp(most - base)
    whole = whole * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
    return found, whole, acc
