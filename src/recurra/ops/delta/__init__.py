"""The gated delta rule: a memory that decays, and corrects what it holds for a key; states kept by slot.

    state = exp(g) * state
    u     = beta * (v - k . state)
    state = state + k (outer) u
    o     = scale * q . state

Two forms, told apart by the rank of ``g``: one log decay a head, (T, Hv), in gated delta nets, or one a key
channel, (T, Hv, K), in Kimi delta attention. Sources: Gated Delta Networks (Yang et al., 2024), equation 10;
Kimi Linear (Moonshot AI, 2025), equation 1.

The chunked form (WY representation). With G_i the sum of g up to token i of a chunk (included), and S the
state before it, the corrections u solve a unit triangular system:

    (I + M) U = beta * (V - (exp(G) * K) S)        M_ij = beta_i sum_c k_ic exp(G_ic - G_jc) k_jc, j < i
    O  = scale * ((exp(G) * Q) S + A U)            A_ij = sum_c q_ic exp(G_ic - G_jc) k_jc, j <= i
    S' = exp(G_last) * S + (exp(G_last - G) * K)^T U

No exponent is positive: decays are differences taken in time's direction.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import Chunks

#: Added to the sum of squares before a query's or key's norm is taken.
NORM_EPS = 1e-6


class GatedDeltaRuleVarlen(Protocol):
    """Apply the rule to packed sequences, reading and writing their states in place.

    Args:
        q, k: (T, Hk, K); v: (T, Hv, V), in one dtype, any token stride; head h of v uses head
            h // (Hv / Hk) of q and k.
        g: (T, Hv) or (T, Hv, K), log decay, at most 0; any float dtype.
        beta: (T, Hv), strength of the correction; any float dtype.
        state: (slots, Hv, K, V), any slot stride, **written in place** for ``slots``.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`.
        scale: factor of the output.
        qk_l2norm: divide each q and k by sqrt(sum of its squares + 1e-6).
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        (T, Hv, V) in v's dtype.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


class GatedDeltaRuleUpdate(Protocol):
    """One new token of each sequence, states in place.

    Args:
        state: (slots, Hv, K, V), any slot stride, **written in place** for ``slots``.
        q, k, v, g, beta: as in :class:`GatedDeltaRuleVarlen`, a row a sequence. scale, qk_l2norm: as there.
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.
        state_scale, rounding: as in :class:`GatedDeltaRuleVarlen`.

    Returns:
        (S, Hv, V) in v's dtype.
    """

    def __call__(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        slots: Tensor,
        *,
        scale: float,
        qk_l2norm: bool,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """Assert that the operands fit each other, the state in the layout (K, V)."""
    rows, key_heads, key = q.shape
    heads = v.shape[1]
    assert k.shape == q.shape, f"k {tuple(k.shape)}, q {tuple(q.shape)}"
    assert v.shape[0] == rows, f"v {tuple(v.shape)}, q {tuple(q.shape)}"
    assert heads % key_heads == 0, f"{heads} value heads are no multiple of {key_heads} key heads"
    assert g.shape in ((rows, heads), (rows, heads, key)), f"g {tuple(g.shape)}: (T, Hv) or (T, Hv, K)"
    assert beta.shape == (rows, heads), f"beta {tuple(beta.shape)}: (T, Hv) is {(rows, heads)}"
    expected = (heads, key, v.shape[2])
    assert state.shape[1:] == expected, f"state {tuple(state.shape[1:])}, (Hv, K, V) is {expected}"
