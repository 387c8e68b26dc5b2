"""The real-gated linear recurrent unit: one number a channel, which decays by a gate of its own, states by slot.

    log a = log_decay * sigmoid(recurrent_gate)
    state = a * state + sqrt(1 - a^2) * sigmoid(input_gate) * x
    y     = state

The first token of a text has nothing before it and isn't scaled: its state is ``sigmoid(input_gate) * x``.
Source: Griffin (De et al., 2024), section 2.4 and appendix A; the unscaled first token is RecurrentGemma's
(Botev et al., 2024).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import Chunks


class RGLRUVarlen(Protocol):
    """Run the recurrence over packed sequences, reading and writing their states in place.

    Args:
        x: (T, channels), and input_gate, recurrent_gate of the same shape and dtype, before their sigmoids; any
            token stride.
        log_decay: (channels,) float32, at most 0: of a gate that is wide open.
        state: (slots, H, P) with H * P channels, any slot stride, **written in place** for ``slots``.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`. A sequence
            without a state begins a text.
        state_scale, rounding: scales of 8-bit states, **written in place**, and how states are rounded (see
            :mod:`recurra.ops.rounding`).

    Returns:
        (T, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        input_gate: Tensor,
        recurrent_gate: Tensor,
        log_decay: Tensor,
        state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        has_state: Tensor,
        chunks: Chunks,
        *,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


class RGLRUUpdate(Protocol):
    """One more token of each sequence, states in place.

    Args:
        state: (slots, H, P), any slot stride, **written in place** for ``slots``.
        x, input_gate, recurrent_gate: (S, channels), any row stride. log_decay: as in :class:`RGLRUVarlen`.
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.
        state_scale, rounding: as in :class:`RGLRUVarlen`.

    Returns:
        (S, channels) in x's dtype.
    """

    def __call__(
        self,
        state: Tensor,
        x: Tensor,
        input_gate: Tensor,
        recurrent_gate: Tensor,
        log_decay: Tensor,
        slots: Tensor,
        *,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


def check_shapes(
    x: Tensor, input_gate: Tensor, recurrent_gate: Tensor, log_decay: Tensor, state: Tensor
) -> None:
    """Assert that the operands fit each other."""
    channels = x.shape[1]
    for name, gate in (("input_gate", input_gate), ("recurrent_gate", recurrent_gate)):
        assert gate.shape == x.shape, f"{name} {tuple(gate.shape)}, x {tuple(x.shape)}"
    assert log_decay.shape == (channels,), f"log_decay {tuple(log_decay.shape)}, {channels} channels"
    assert state.dim() == 3, f"state {tuple(state.shape)}, (slots, H, P) is expected"
    assert state[0].numel() == channels, f"state {tuple(state.shape[1:])}, {channels} channels"
