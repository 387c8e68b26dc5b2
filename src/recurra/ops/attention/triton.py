"""Attention over pages on GPUs."""

from __future__ import annotations

from recurra.ops.attention.triton_prefill import attention_varlen
from recurra.ops.attention.triton_store import store_kv
from recurra.ops.attention.triton_update import attention_update

__all__ = ["attention_update", "attention_varlen", "store_kv"]
