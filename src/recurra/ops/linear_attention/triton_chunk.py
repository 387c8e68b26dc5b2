"""Lightning attention over packed sequences on GPUs, in two kernels.

1. states: a program carries a tile of one head's state over one sequence, in registers and float32, and
   leaves the state before each piece of BT tokens in memory, in the activations' dtype.
2. outputs: all pieces at once.

Exponents are the head's rate times a distance of at most BT tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.linear_attention import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import plain_states
from recurra.types import Chunks


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state", "cu_chunks"])
def _states_kernel(
    k,
    v,
    log_decay,
    state,
    before,
    cu_seqlens,
    slots,
    has_state,
    cu_chunks,
    k_row,
    k_head,
    v_row,
    v_head,
    state_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    k_blocks: tl.constexpr = (K + BK - 1) // BK
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    parts: tl.constexpr = (Q + BT - 1) // BT  # pieces of a chunk
    pid = tl.program_id(0)
    vi = (pid % v_blocks) * BV + tl.arange(0, BV)
    ki = ((pid // v_blocks) % k_blocks) * BK + tl.arange(0, BK)
    h = (pid // (v_blocks * k_blocks)) % H
    seq = pid // (v_blocks * k_blocks * H)
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    if begin == end:
        return
    k_ok, v_ok = ki < K, vi < V
    ok = k_ok[:, None] & v_ok[None, :]
    inner = ki[:, None] * V + vi[None, :]
    kept = tl.load(has_state + seq).to(tl.int1)
    slot_at = state + tl.load(slots + seq).to(tl.int64) * state_slot + h * (K * V)
    acc = tl.load(slot_at + inner, mask=ok & kept, other=0.0).to(tl.float32)
    rate = tl.load(log_decay + h)
    first_chunk = tl.load(cu_chunks + seq).to(tl.int64)
    length = (end - begin).to(tl.int32)
    count = (length // Q) * parts + (length % Q + BT - 1) // BT
    t = tl.arange(0, BT)
    for i in range(count):
        chunk = i // parts
        offset = (i % parts) * BT
        start = begin + chunk * Q + offset
        size = tl.minimum(tl.minimum(BT, Q - offset), (end - start).to(tl.int32))
        piece = (first_chunk + chunk) * parts + i % parts
        before_at = before + (piece * H + h) * (K * V)
        tl.store(before_at + inner, acc.to(before.dtype.element_ty), mask=ok)
        t_ok = t < size
        left = tl.exp(rate * tl.maximum(size - 1 - t, 0).to(tl.float32))
        k_at = k + start * k_row + h * k_head
        v_at = v + start * v_row + h * v_head
        keys = tl.load(
            k_at + (t[None, :] * k_row + ki[:, None]), mask=t_ok[None, :] & k_ok[:, None], other=0.0
        )
        values = tl.load(
            v_at + (t[:, None] * v_row + vi[None, :]), mask=t_ok[:, None] & v_ok[None, :], other=0.0
        )
        weighted = (keys.to(tl.float32) * left[None, :]).to(keys.dtype)
        acc = acc * tl.exp(rate * size.to(tl.float32))
        acc = tl.dot(weighted, values, acc, input_precision=PRECISION)
    tl.store(slot_at + inner, acc.to(state.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize_on_alignment=["chunk_start", "chunk_length"])
def _outputs_kernel(
    q,
    k,
    v,
    log_decay,
    before,
    out,
    chunk_start,
    chunk_length,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    parts: tl.constexpr = (Q + BT - 1) // BT
    pid = tl.program_id(0)
    vi = (pid % v_blocks) * BV + tl.arange(0, BV)
    h = (pid // v_blocks) % H
    part = (pid // (v_blocks * H)) % parts
    chunk = (pid // (v_blocks * H * parts)).to(tl.int64)
    size = tl.load(chunk_length + chunk) - part * BT
    if size <= 0:
        return
    start = tl.load(chunk_start + chunk).to(tl.int64) + part * BT
    t = tl.arange(0, BT)
    ki = tl.arange(0, BK)
    t_ok, v_ok = t < size, vi < V
    rate = tl.load(log_decay + h)
    q_at = q + start * q_row + h * q_head
    k_at = k + start * k_row + h * k_head
    v_at = v + start * v_row + h * v_head
    s_at = before + ((chunk * parts + part) * H + h) * (K * V)
    acc = tl.zeros((BT, BV), tl.float32)
    scores = tl.zeros((BT, BT), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        k_ok = k0 + ki < K
        queries = tl.load(
            q_at + (t[:, None] * q_row + ki[None, :] + k0), mask=t_ok[:, None] & k_ok[None, :], other=0.0
        )
        keys = tl.load(
            k_at + (t[None, :] * k_row + ki[:, None] + k0), mask=t_ok[None, :] & k_ok[:, None], other=0.0
        )
        carried = tl.load(
            s_at + ((k0 + ki)[:, None] * V + vi[None, :]), mask=k_ok[:, None] & v_ok[None, :], other=0.0
        )
        scores = tl.dot(queries, keys, scores, input_precision=PRECISION)
        acc = tl.dot(queries, carried, acc, input_precision=PRECISION)
    apart = t[:, None] - t[None, :]
    past = (apart >= 0) & t_ok[:, None] & t_ok[None, :]
    weights = tl.where(past, scores * tl.exp(rate * tl.maximum(apart, 0).to(tl.float32)), 0.0)
    values = tl.load(v_at + (t[:, None] * v_row + vi[None, :]), mask=t_ok[:, None] & v_ok[None, :], other=0.0)
    acc *= tl.exp(rate * (t + 1).to(tl.float32))[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION) * scale
    y_at = out + (start * H + h) * V
    tl.store(
        y_at + (t[:, None] * (H * V) + vi[None, :]),
        acc.to(out.dtype.element_ty),
        mask=t_ok[:, None] & v_ok[None, :],
    )


def _fit(size: int, most: int) -> int:
    return min(max(16, int(triton.next_power_of_2(size))), most)


def lightning_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionVarlen`."""
    check_shapes(q, k, v, log_decay, state)
    tokens, heads, key = q.shape
    value = v.shape[2]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensor.dtype == v.dtype, f"{name} is {tensor.dtype}, v is {v.dtype}"
        assert tensor.stride(2) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
        assert tensor.stride(0) * chunks.size < 2**31, f"{name} strides {tensor.stride()}: rows too far apart"
    assert state.stride()[1:] == (key * value, value, 1), state.stride()
    out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    num_chunks = chunks.seq.shape[0]
    if num_chunks == 0:
        return out
    exact = v.dtype == torch.float32  # ordinary multiplications, for which smaller tiles compile better
    largest = 32 if exact else 64
    precision = "ieee" if exact else "tf32"
    block_t, block_k, block_v = _fit(chunks.size, largest), _fit(key, largest), _fit(value, largest)
    parts = triton.cdiv(chunks.size, block_t)
    before = torch.empty((num_chunks * parts, heads, key, value), dtype=v.dtype, device=v.device)
    v_blocks = triton.cdiv(value, block_v)
    states = plain_states(state, state_scale, slots, has_state, rounding)
    with torch.cuda.device_of(v):
        _states_kernel[(slots.shape[0] * heads * triton.cdiv(key, block_k) * v_blocks,)](
            k, v, log_decay, states.rows, before, cu_seqlens, states.slots, has_state, chunks.cu_chunks,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), states.rows.stride(0),
            H=heads, K=key, V=value, Q=chunks.size, PRECISION=precision, BT=block_t, BK=block_k, BV=block_v,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        _outputs_kernel[(num_chunks * parts * heads * v_blocks,)](
            q, k, v, log_decay, before, out, chunks.start, chunks.length, float(scale),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            H=heads, K=key, V=value, Q=chunks.size, PRECISION=precision, BT=block_t, BK=block_k, BV=block_v,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    states.commit(cu_seqlens)
    return out
