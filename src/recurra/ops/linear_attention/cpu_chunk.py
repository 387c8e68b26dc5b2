"""Lightning attention over packed sequences on the CPU: chunks of float32 matrix products, all heads at once.

With L the log decay and i, j counted from 1 inside a chunk of Q tokens,

    o_i    = scale * (exp(i L) q_i . state  +  sum over j <= i of exp((i - j) L) (q_i . k_j) v_j)
    state' = exp(Q L) state  +  sum over j of exp((Q - j) L) k_j (outer) v_j

Every exponent is a difference that is at most zero. A sequence's products have the same shapes and operands
wherever it is packed, so that its bits don't depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recurra.ops.cpu.calls import as_float32
from recurra.ops.linear_attention import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states
from recurra.types import Chunks

_Q = 64  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class _Decays:
    """Decays inside a full chunk: from its start to each token, between tokens, per head."""

    entering: Tensor  # (H, Q + 1), after i tokens
    between: Tensor  # (H, Q, Q), lower triangle

    @classmethod
    def of(cls, log_decay: Tensor) -> _Decays:
        # In float64, because an exponent's absolute error is the decay's relative one.
        rate = log_decay.double()[:, None]
        steps = torch.arange(_Q + 1, dtype=torch.float64)
        apart = (steps[1:, None] - steps[None, 1:]).clamp(min=0)
        between = torch.exp(rate[:, :, None] * apart).tril()
        return cls(torch.exp(rate * steps).float(), between.float())


def _chunk(q: Tensor, k: Tensor, v: Tensor, decays: _Decays, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of all heads: q, k (H, n, K), v (H, n, V), state (H, K, V); the output and the next state."""
    n = q.shape[1]
    entering = decays.entering[:, 1 : n + 1, None]
    leaving = decays.entering[:, :n].flip(1)[:, :, None]
    weights = torch.matmul(q, k.transpose(1, 2)).mul_(decays.between[:, :n, :n])
    out = torch.matmul(weights, v).add_(torch.matmul(q * entering, state))
    added = torch.matmul((k * leaving).transpose(1, 2), v)
    return out, added.add_(state * decays.entering[:, n, None, None])


def lightning_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionVarlen`.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    del chunks  # its own length suits the matrix products better
    check_shapes(q, k, v, log_decay, state)
    states = plain_states(state, state_scale, slots, rounding)
    wide = [as_float32(t, name) for t, name in ((q, "q"), (k, "k"), (v, "v"))]
    out = torch.empty(v.shape, dtype=torch.float32)
    decays = _Decays.of(log_decay)
    bounds = cu_seqlens.tolist()
    for s, (slot, known) in enumerate(zip(states.slots.tolist(), has_state.tolist(), strict=True)):
        if bounds[s] == bounds[s + 1]:
            continue
        carried = states.rows[slot].clone() if known else torch.zeros(state.shape[1:])
        for begin in range(bounds[s], bounds[s + 1], _Q):
            rows = slice(begin, min(begin + _Q, bounds[s + 1]))
            # Copies, whose alignment is always the same: matrix products may round by it.
            qs, ks, vs = (t[rows].transpose(0, 1).clone(memory_format=torch.contiguous_format) for t in wide)
            y, carried = _chunk(qs.mul_(scale), ks, vs, decays, carried)
            out[rows] = y.transpose(0, 1)
        states.rows[slot] = carried
    states.commit(cu_seqlens)
    return out.to(v.dtype)
