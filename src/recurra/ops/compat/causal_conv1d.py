"""causal_conv1d's two functions."""

from __future__ import annotations

from recurra.ops.compat.conv import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
