"""Causal depthwise convolution with its window kept by slot.

``y[t, c] = act(bias[c] + sum_w weight[c, w] * u[t - W + 1 + w, c])`` where ``u`` is the sequence's
input, preceded by its stored window (zeros when it has none). The window is the last W - 1 *inputs*,
before the activation. Source: Mamba (Gu and Dao, 2023), section 3.4.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.types import Chunks


class CausalConv1dVarlen(Protocol):
    """Convolve packed sequences, reading and writing their windows in place.

    Args:
        x: (T, channels), any row stride, unit channel stride; float32, bfloat16, float16 (float64
            in the reference).
        weight: (channels, W), W from 2 to 5.
        bias: (channels,) or None.
        conv_state: (slots, channels, W - 1), any slot stride; **written in place** for ``slots``.
        cu_seqlens: (S + 1,) int32, bounds of the sequences in x. Empty sequences leave their slot.
        slots: (S,) int32. Slot 0 is scratch: its sequence's output is undefined and it may be written.
        has_state: (S,) bool; False means a window of zeros, whatever the slot holds.
        silu: apply x * sigmoid(x) to the result.

    Returns:
        (T, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        has_state: Tensor,
        chunks: Chunks,
        *,
        silu: bool,
    ) -> Tensor: ...


class CausalConv1dUpdate(Protocol):
    """Convolve one new token of each sequence, shifting its window in place.

    Args:
        x: (S, channels), any row stride.
        weight, bias, conv_state, silu: as in :class:`CausalConv1dVarlen`.
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.

    Returns:
        (S, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        slots: Tensor,
        *,
        silu: bool,
    ) -> Tensor: ...
