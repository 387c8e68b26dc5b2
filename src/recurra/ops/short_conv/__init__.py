"""The gated short convolution of LFM2: gate, causal convolution, gate, with its window kept by slot.

``y[t] = C[t] * conv(u)[t]`` with ``u[t] = B[t] * x[t]``, elementwise but for the convolution, which is that
of :mod:`recurra.ops.conv1d` without an activation. ``u`` is rounded to x's dtype, in which the window keeps
it: a prompt in pieces then sees the very numbers that a whole one does.
Source: Liquid Foundation Models 2 (Liquid AI, 2025), the double-gated short-range convolution.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.types import Chunks


class ShortConvVarlen(Protocol):
    """Gate and convolve packed sequences, reading and writing their windows in place.

    Args:
        x, B, C: (T, channels) in one dtype, any row stride, unit channel stride.
        weight: (channels, W), W from 2 to 5. bias: (channels,) or None.
        conv_state: (slots, channels, W - 1), the last inputs u, any slot stride; **written in place**.
        cu_seqlens, slots, has_state, chunks: as in :class:`recurra.ops.conv1d.CausalConv1dVarlen`.

    Returns:
        (T, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        slots: Tensor,
        has_state: Tensor,
        chunks: Chunks,
    ) -> Tensor: ...


class ShortConvUpdate(Protocol):
    """One new token of each sequence, shifting its window in place.

    Args:
        x, B, C: (S, channels), any row stride.
        weight, bias, conv_state: as in :class:`ShortConvVarlen`.
        slots: (S,) int32; rows of slot 0 are padding: nothing but slot 0 is touched for them.

    Returns:
        (S, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        slots: Tensor,
    ) -> Tensor: ...
