"""One step of lightning attention on GPUs: a program holds all K rows of some columns of a head's state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.linear_attention import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import plain_states

_TILE = 4096  # state elements of a program


@triton.jit(do_not_specialize_on_alignment=["slots", "places"])
def _update_kernel(
    state,
    q,
    k,
    v,
    log_decay,
    slots,
    places,
    out,
    scale,
    state_slot,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vi = (pid % blocks) * BV + tl.arange(0, BV)
    h = (pid // blocks) % H
    row = (pid // (blocks * H)).to(tl.int64)
    ki = tl.arange(0, BK)
    k_ok, v_ok = ki < K, vi < V
    place = tl.load(places + row).to(tl.int64)
    y_at = out + (row * H + h) * V + vi
    if tl.load(slots + row) == 0:
        tl.store(y_at, tl.zeros((BV,), out.dtype.element_ty), mask=v_ok)
        return
    ok = k_ok[:, None] & v_ok[None, :]
    tile = state + place * state_slot + h * (K * V) + ki[:, None] * V + vi[None, :]
    carried = tl.load(tile, mask=ok, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(log_decay + h))
    query = tl.load(q + row * q_row + h * q_head + ki, mask=k_ok, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_row + h * k_head + ki, mask=k_ok, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_row + h * v_head + vi, mask=v_ok, other=0.0).to(tl.float32)
    carried = decay * carried + key[:, None] * value[None, :]
    tl.store(tile, carried.to(state.dtype.element_ty), mask=ok)
    y = tl.sum(carried * query[:, None], axis=0) * scale
    tl.store(y_at, y.to(out.dtype.element_ty), mask=v_ok)


def lightning_attention_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionUpdate`. The output of padding rows is zero."""
    check_shapes(q, k, v, log_decay, state)
    rows, heads, key = q.shape
    value = v.shape[2]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensor.stride(2) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    assert state.stride()[1:] == (key * value, value, 1), state.stride()
    out = torch.empty((rows, heads, value), dtype=v.dtype, device=v.device)
    if rows == 0:
        return out
    block_k = triton.next_power_of_2(key)
    block_v = min(triton.next_power_of_2(value), max(8, _TILE // block_k))
    states = plain_states(state, state_scale, slots, None, rounding)
    with torch.cuda.device_of(v):
        _update_kernel[(rows * heads * triton.cdiv(value, block_v),)](
            states.rows, q, k, v, log_decay, slots, states.slots, out, float(scale), states.rows.stride(0),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            H=heads, K=key, V=value, BK=block_k, BV=block_v, num_warps=4,
        )  # fmt: skip
    states.commit(None)
    return out
