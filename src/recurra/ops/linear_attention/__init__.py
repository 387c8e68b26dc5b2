"""Lightning attention: linear attention whose memory decays at one rate a head, states kept by slot.

    state = exp(log_decay) * state + k (outer) v
    o     = scale * q . state

Sources: TransNormerLLM (Qin et al., 2023), section 3.1; Lightning Attention-2 (Qin et al., 2024), equation 3.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import Chunks


class LightningAttentionVarlen(Protocol):
    """Attend over packed sequences, reading and writing their states in place.

    Args:
        q, k: (T, H, K); v: (T, H, V), in one dtype, any token stride.
        log_decay: (H,) float32, at most 0.
        state: (slots, H, K, V), any slot stride, **written in place** for ``slots``.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`.
        scale: factor of the output.
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        (T, H, V) in v's dtype.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


class LightningAttentionUpdate(Protocol):
    """One new token of each sequence, states in place.

    Args:
        state: (slots, H, K, V), any slot stride, **written in place** for ``slots``.
        q, k: (S, H, K); v: (S, H, V), any row stride. log_decay, scale: as in
            :class:`LightningAttentionVarlen`.
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.
        state_scale, rounding: as in :class:`LightningAttentionVarlen`.

    Returns:
        (S, H, V) in v's dtype.
    """

    def __call__(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        slots: Tensor,
        *,
        scale: float = 1.0,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


def check_shapes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> None:
    """Assert that the operands fit each other, the state in the layout (K, V)."""
    heads, key = q.shape[1:]
    assert k.shape == q.shape, f"k {tuple(k.shape)}, q {tuple(q.shape)}"
    assert v.shape[:2] == q.shape[:2], f"v {tuple(v.shape)}, q {tuple(q.shape)}"
    assert log_decay.shape == (heads,), f"log_decay {tuple(log_decay.shape)}, {heads} heads"
    expected = (heads, key, v.shape[2])
    assert state.shape[1:] == expected, f"state {tuple(state.shape[1:])}, (H, K, V) is {expected}"
