"""The causal convolution's CPU backend."""

from __future__ import annotations

from recurra.ops.conv1d.cpu_update import causal_conv1d_update
from recurra.ops.conv1d.cpu_varlen import causal_conv1d_varlen

__all__ = ["causal_conv1d_update", "causal_conv1d_varlen"]
