"""The gated short convolution's CPU backend. In prefill PyTorch multiplies and the convolution does the rest."""

from __future__ import annotations

from torch import Tensor

from recurra.ops.conv1d import cpu
from recurra.ops.short_conv.cpu_update import short_conv_update
from recurra.types import Chunks

__all__ = ["short_conv_update", "short_conv_varlen"]


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
    """See :class:`recurra.ops.short_conv.ShortConvVarlen`.

    Raises:
        ConfigError: inputs or windows in a dtype that isn't float32, bfloat16 or float16.
    """
    y = cpu.causal_conv1d_varlen(
        B * x, weight, bias, conv_state, cu_seqlens, slots, has_state, chunks, silu=False
    )
    return y.mul_(C)
