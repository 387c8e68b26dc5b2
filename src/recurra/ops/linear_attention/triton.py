"""Lightning attention on GPUs."""

from __future__ import annotations

from recurra.ops.linear_attention.triton_chunk import lightning_attention_varlen
from recurra.ops.linear_attention.triton_update import lightning_attention_update

__all__ = ["lightning_attention_update", "lightning_attention_varlen"]
