"""Attention over pages in PyTorch's own operators, for GPUs without Triton. It waits for the device at each call."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.attention.blocked import attention_varlen
from recurra.ops.attention.reference import store_kv

__all__ = ["attention_update", "attention_varlen", "store_kv"]


def attention_update(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    max_context: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """See :class:`recurra.ops.attention.AttentionUpdate`. Each row is a piece of one token; padding has none."""
    real = (context_lens > 0).nonzero()[:, 0]
    bounds = torch.arange(real.shape[0] + 1, device=q.device)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    out[real] = attention_varlen(
        q[real], k_cache, v_cache, page_table[real], bounds, context_lens[real], max_seqlen=1,
        max_context=max_context, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
    return out
