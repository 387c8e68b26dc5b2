"""The definition of the gated short convolution. Computes in float32, or float64 if given it."""

from __future__ import annotations

from torch import Tensor

from recurra.ops.conv1d import reference
from recurra.ops.precision import wide
from recurra.types import Chunks


def short_conv_varlen(
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
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvVarlen`."""
    dtype = wide(x, weight)
    u = (B * x).to(dtype)
    y = reference.causal_conv1d_varlen(
        u, weight, bias, conv_state, cu_seqlens, slots, has_state, chunks, silu=False
    )
    return (C.to(dtype) * y).to(x.dtype)


def short_conv_update(
    x: Tensor, B: Tensor, C: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, slots: Tensor
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvUpdate`."""
    dtype = wide(x, weight)
    y = reference.causal_conv1d_update((B * x).to(dtype), weight, bias, conv_state, slots, silu=False)
    return (C.to(dtype) * y).to(x.dtype)
