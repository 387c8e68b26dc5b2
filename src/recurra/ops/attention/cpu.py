"""Attention's CPU backend."""

from __future__ import annotations

from recurra.ops.attention.blocked import attention_varlen
from recurra.ops.attention.cpu_update import attention_update
from recurra.ops.attention.reference import store_kv

__all__ = ["attention_update", "attention_varlen", "store_kv"]
