"""The gated delta rule over packed sequences on the CPU: chunks of float32 matrix products, all heads at once.

The chunked form is that of :mod:`recurra.ops.delta`; its triangular system is solved, never inverted. Log
decays are summed and subtracted in float64, because an exponent's absolute error is the decay's relative
one. With a decay for each channel the products k_i . k_j don't factor safely over a whole chunk:
``exp(G_i) * exp(-G_j)`` overflows. Over blocks of rows they do, with the sum R before the block between the
two: ``exp(G_i - R) * exp(R - G_j)`` for j before the block; inside it they are summed as they stand.

A sequence's products have the same shapes and operands wherever it is packed, so that its bits don't depend
on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.cpu.calls import as_float32
from recurra.ops.delta import NORM_EPS, check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states
from recurra.types import Chunks

_Q = 64  # tokens of a chunk
_BLOCK = 8  # rows of a block, with a decay for each channel


def _unit(x: Tensor) -> Tensor:
    """Rows over their norm."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _products_by_head(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """``sum_c left_ic right_jc exp(G_i - G_j)`` for j <= i: (H, n, K) twice, sums (H, n)."""
    decay = torch.exp((sums[:, :, None] - sums[:, None, :]).clamp(max=0)).float()
    return torch.matmul(left, right.transpose(1, 2)).mul_(decay).tril_()


def _products_by_channel(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """``sum_c left_ic right_jc exp(G_ic - G_jc)`` for j <= i: (..., n, K) and (H, n, K) twice."""
    n = right.shape[1]
    out = left.new_zeros(*left.shape[:-1], n)
    for first in range(0, n, _BLOCK):
        rows = slice(first, min(first + _BLOCK, n))
        own = sums[:, rows]
        between = (own[:, :, None] - own[:, None]).clamp(max=0).float().exp_()
        inside = (between * right[:, None, rows] * left[..., rows, None, :]).sum(-1)
        out[..., rows, rows] = inside.tril()
        if first:
            before = sums[:, first - 1 : first]
            entered = left[..., rows, :] * torch.exp(own - before).float()
            kept = right[:, :first] * torch.exp(before - sums[:, :first]).float()
            out[..., rows, :first] = torch.matmul(entered, kept.transpose(1, 2))
    return out


def _products(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """A and M without its beta, both with their diagonals."""
    if sums.dim() == 3:
        both = _products_by_channel(torch.stack((q, k)), k, sums)
        return both[0], both[1]
    return _products_by_head(q, k, sums), _products_by_head(k, k, sums)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of all heads: q, k (H, n, K), v (H, n, V), sums (H, n) or (H, n, K), beta (H, n, 1)."""
    weights, lower = _products(q, k, sums)
    columns = sums if sums.dim() == 3 else sums[:, :, None]
    entering, last = torch.exp(columns).float(), columns[:, -1:]
    wanted = beta * (v - torch.matmul(k * entering, state))
    corrections = torch.linalg.solve_triangular(beta * lower, wanted, upper=False, unitriangular=True)
    out = torch.matmul(q * entering, state) + torch.matmul(weights, corrections)
    left = k * torch.exp(last - columns).float()
    state = state * torch.exp(last).float().transpose(1, 2)
    return out, state + torch.matmul(left.transpose(1, 2), corrections)


def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleVarlen`.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    del chunks  # its own length suits the matrix products better
    check_shapes(q, k, v, g, beta, state)
    heads_a_key = v.shape[1] // q.shape[1]
    states = plain_states(state, state_scale, slots, rounding)
    wide = [as_float32(t, name) for name, t in (("q", q), ("k", k), ("v", v), ("beta", beta), ("g", g))]
    out = torch.empty(v.shape, dtype=torch.float32)
    bounds = cu_seqlens.tolist()
    for s, (slot, known) in enumerate(zip(states.slots.tolist(), has_state.tolist(), strict=True)):
        carried = states.rows[slot].clone() if known else torch.zeros(state.shape[1:])
        for begin in range(bounds[s], bounds[s + 1], _Q):
            rows = slice(begin, min(begin + _Q, bounds[s + 1]))
            # Copies, whose alignment is always the same: matrix products may round by it.
            qs, ks, vs, bs, gs = (
                t[rows].transpose(0, 1).clone(memory_format=torch.contiguous_format) for t in wide
            )
            if qk_l2norm:
                qs, ks = _unit(qs), _unit(ks)
            qs, ks = (t.repeat_interleave(heads_a_key, 0) for t in (qs.mul_(scale), ks))
            y, carried = _chunk(qs, ks, vs, gs.double().cumsum(1), bs[:, :, None], carried)
            out[rows] = y.transpose(0, 1)
        if bounds[s] < bounds[s + 1]:
            states.rows[slot] = carried
    states.commit(cu_seqlens)
    return out.to(v.dtype)
