"""The selective state-space recurrence of Mamba-1 and Mamba-2, states kept by slot.

For each step ``dt = softplus(dt_raw + dt_bias)`` (clamped to ``dt_limit`` in Mamba-2), then

    state = exp(dt * A) * state + dt * x (outer) B
    y     = state . C + D * x              (Mamba-1 then multiplies by silu(z))

Sources: Mamba (Gu and Dao, 2023), equations 1 to 4; Mamba-2 (Dao and Gu, 2024), section 6.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import Chunks


class SelectiveScanVarlen(Protocol):
    """Mamba-1's scan over packed sequences, reading and writing their states in place.

    Args:
        x: (T, channels), the convolved input; any row stride, unit channel stride.
        dt: (T, channels) before bias and softplus.
        A: (channels, N) float32, negative real. B, C: (T, N), any row stride.
        D: (channels,) or None. z: (T, channels) or None, the gate. dt_bias: (channels,) or None.
        ssm_state: (slots, channels, N), any slot stride, **written in place** for ``slots``.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`.
        dt_softplus: apply softplus to dt.
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        (T, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        ssm_state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        has_state: Tensor,
        chunks: Chunks,
        *,
        dt_softplus: bool = True,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


class SSDVarlen(Protocol):
    """Mamba-2's chunked scan (SSD) over packed sequences, reading and writing states in place.

    Args:
        x: (T, H, P), any token stride. dt: (T, H) before bias and softplus. A: (H,) float32, negative.
        B, C: (T, G, N), any token stride; head h uses group h // (H / G).
        D: (H,) or (H, P) or None. dt_bias: (H,) or None.
        ssm_state: (slots, H, P, N), any slot stride, **written in place** for ``slots``.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`.
        dt_limit: bounds of dt after softplus.
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        (T, H, P) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        ssm_state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        has_state: Tensor,
        chunks: Chunks,
        *,
        dt_softplus: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


class SelectiveStateUpdate(Protocol):
    """One step of the recurrence for one new token of each sequence, states in place.

    Two forms, told apart by the rank of ``ssm_state``:

    * Mamba-1: ssm_state (slots, channels, N); x, dt, z (S, channels); A (channels, N); B, C (S, N);
      D, dt_bias (channels,).
    * Mamba-2: ssm_state (slots, H, P, N); x, z (S, H, P); dt (S, H); A (H,); B, C (S, G, N);
      D (H,) or (H, P); dt_bias (H,).

    Args:
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.
        z: gate, or None; y is multiplied by silu(z).
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        like x.
    """

    def __call__(
        self,
        ssm_state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        slots: Tensor,
        *,
        dt_softplus: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...
