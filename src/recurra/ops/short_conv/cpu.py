"""The gated short convolution on the CPU: PyTorch multiplies, the convolution's kernel does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.conv1d import cpu
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
    """See :class:`recurra.ops.short_conv.ShortConvVarlen`.

    Raises:
        ConfigError: inputs or windows in a dtype that isn't float32, bfloat16 or float16.
    """
    y = cpu.causal_conv1d_varlen(
        B * x, weight, bias, conv_state, cu_seqlens, slots, has_state, chunks, silu=False
    )
    return y.mul_(C)


def short_conv_update(
    x: Tensor, B: Tensor, C: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, slots: Tensor
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs or windows in a dtype that isn't float32, bfloat16 or float16.
    """
    y = cpu.causal_conv1d_update(B * x, weight, bias, conv_state, slots, silu=False)
    y.mul_(C)
    # A padding row's gate may be NaN.
    return torch.where((slots != 0)[:, None], y, torch.zeros((), dtype=y.dtype))
