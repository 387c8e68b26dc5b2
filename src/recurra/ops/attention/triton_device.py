"""What both attention kernels share: where a position is, the scores' bound, and the running softmax.

Scores are kept in units of log 2, so that weights are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(table, position, ok, PAGE: tl.constexpr):
    """Rows of the flattened cache that hold positions; row 0 where not ``ok``."""
    page = tl.load(table + position // PAGE, mask=ok, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def bounded(scores, scale, softcap, CAPPED: tl.constexpr):
    """``scale * scores``, perhaps through ``softcap * tanh(. / softcap)``, in units of log 2."""
    if CAPPED:
        e = tl.exp(scores * (2.0 * scale / softcap))
        return (softcap - 2.0 * softcap / (e + 1.0)) * _LOG2E
    return scores * (scale * _LOG2E)


@triton.jit
def absorb(scores, values, most, whole, acc, PRECISION: tl.constexpr):
    """One more block of keys: scores (rows, keys), -infinity where unseen, and values (keys, V)."""
    found = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(found == float("-inf"), 0.0, found)  # of a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(most - base)
    whole = whole * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
    return found, whole, acc
