"""Keys and values to their places on GPUs: a program writes a part of one token's keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@triton.jit(do_not_specialize_on_alignment=["kv_rows"])
def _store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    kv_rows,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(kv_rows + token)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(k + token * k_row + (i // K) * k_head + i % K, mask=i < HEADS * K)
    tl.store(k_cache + at * (HEADS * K) + i, key.to(k_cache.dtype.element_ty), mask=i < HEADS * K)
    value = tl.load(v + token * v_row + (i // V) * v_head + i % V, mask=i < HEADS * V)
    tl.store(v_cache + at * (HEADS * V) + i, value.to(v_cache.dtype.element_ty), mask=i < HEADS * V)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_rows: Tensor) -> None:
    """See :class:`recurra.ops.attention.StoreKV`."""
    tokens, heads, key = k.shape
    value = v.shape[2]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert cache.is_contiguous(), f"{name} strides {cache.stride()}"
    for name, tensor in (("k", k), ("v", v)):
        assert tensor.stride(2) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    if tokens == 0:
        return
    with torch.cuda.device_of(k):
        _store_kernel[(tokens, triton.cdiv(heads * max(key, value), _BLOCK))](
            k, v, k_cache, v_cache, kv_rows, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, K=key, V=value, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
