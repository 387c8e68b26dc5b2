"""Filters of the short convolution inside a Mamba mixer."""

from __future__ import annotations

import torch
from torch import nn

from recurra.layers.dtypes import Dtypes, optional, parameter


class Conv1dWeights(nn.Module):
    """Filters of a depthwise causal convolution: weight (channels, W), bias (channels,) or None."""

    def __init__(
        self, channels: int, width: int, *, bias: bool, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(channels, width, dtype=dtypes.act, device=device)
        self.bias = optional(bias, channels, dtype=dtypes.act, device=device)
