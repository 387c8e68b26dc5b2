"""The real-gated linear recurrent unit on GPUs.

A program carries the state of some channels of one sequence, and takes BT tokens at a time by a parallel scan over
pairs: (a, b) then (a', b') is (a a', a' b + b').
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rg_lru import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import plain_states
from recurra.ops.triton_math import decay_of
from recurra.types import Chunks

_TOKENS, _CHANNELS = 64, 32


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x) by e^-|x|, which can't overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _below_one(u):
    """1 - e^u for u <= 0, to the last bits near 0 too: by its series, whose rest is below 2^-27 for u > -1/2."""
    p = u * (1.0 / 40320.0) + 1.0 / 5040.0
    p = p * u + 1.0 / 720.0
    p = p * u + 1.0 / 120.0
    p = p * u + 1.0 / 24.0
    p = p * u + 1.0 / 6.0
    p = p * u + 0.5
    p = p * u + 1.0
    return tl.where(u < -0.5, 1.0 - tl.exp(u), -p * u)


@triton.jit
def _step(x, gate, recur, log_decay):
    """The decay, what is added to the state, and the same unscaled."""
    log_a = log_decay * _sigmoid(recur)
    gated = _sigmoid(gate) * x
    return decay_of(log_a), tl.sqrt(_below_one(2.0 * log_a)) * gated, gated


@triton.jit
def _then(a, b, after_a, after_b):
    return a * after_a, after_a * b + after_b


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state"])
def _varlen_kernel(
    x,
    gate,
    recur,
    log_decay,
    state,
    out,
    cu_seqlens,
    slots,
    has_state,
    x_row,
    gate_row,
    recur_row,
    state_slot,
    CHANNELS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    seq = pid // blocks
    c = (pid % blocks) * BC + tl.arange(0, BC)
    c_ok = c < CHANNELS
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    if begin == end:
        return
    known = tl.load(has_state + seq).to(tl.int1)
    at = state + tl.load(slots + seq).to(tl.int64) * state_slot + c
    carried = tl.load(at, mask=c_ok & known, other=0.0).to(tl.float32)
    rate = tl.load(log_decay + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    for start in range(begin, end, BT):
        t = start + tl.arange(0, BT)
        live = t < end
        ok = live[:, None] & c_ok[None, :]
        xs = tl.load(x + t[:, None] * x_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
        gates = tl.load(gate + t[:, None] * gate_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
        recurs = tl.load(recur + t[:, None] * recur_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
        a, b, gated = _step(xs, gates, recurs, rate)
        first = (t == begin)[:, None] & (known == 0)
        b = tl.where(first, gated, b)
        a = tl.where(live[:, None], a, 1.0)
        b = tl.where(live[:, None], b, 0.0)
        kept, added = tl.associative_scan((a, b), 0, _then)
        states = kept * carried[None, :] + added
        tl.store(out + t[:, None] * CHANNELS + c[None, :], states.to(out.dtype.element_ty), mask=ok)
        last = (tl.arange(0, BT) == BT - 1)[:, None]
        carried = tl.sum(tl.where(last, states, 0.0), axis=0)
    tl.store(at, carried.to(state.dtype.element_ty), mask=c_ok)


@triton.jit(do_not_specialize_on_alignment=["slots", "places"])
def _update_kernel(
    x,
    gate,
    recur,
    log_decay,
    state,
    out,
    slots,
    places,
    x_row,
    gate_row,
    recur_row,
    state_slot,
    CHANNELS: tl.constexpr,
    BC: tl.constexpr,
):
    blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    c_ok = c < CHANNELS
    y_at = out + row * CHANNELS + c
    if tl.load(slots + row) == 0:
        tl.store(y_at, tl.zeros((BC,), out.dtype.element_ty), mask=c_ok)
        return
    at = state + tl.load(places + row).to(tl.int64) * state_slot + c
    xs = tl.load(x + row * x_row + c, mask=c_ok, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + c, mask=c_ok, other=0.0).to(tl.float32)
    recurs = tl.load(recur + row * recur_row + c, mask=c_ok, other=0.0).to(tl.float32)
    a, b, _gated = _step(xs, gates, recurs, tl.load(log_decay + c, mask=c_ok, other=0.0).to(tl.float32))
    new = a * tl.load(at, mask=c_ok, other=0.0).to(tl.float32) + b
    tl.store(at, new.to(state.dtype.element_ty), mask=c_ok)
    tl.store(y_at, new.to(out.dtype.element_ty), mask=c_ok)


def _check(x: Tensor, gate: Tensor, recur: Tensor, log_decay: Tensor, state: Tensor) -> None:
    check_shapes(x, gate, recur, log_decay, state)
    for name, tensor in (("x", x), ("input_gate", gate), ("recurrent_gate", recur)):
        assert tensor.stride(1) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    assert state.stride()[1:] == (state.shape[2], 1), state.stride()
    assert log_decay.is_contiguous(), log_decay.stride()


def rg_lru_varlen(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUVarlen`."""
    del chunks  # a sequence is walked whole, BT tokens at a time
    _check(x, input_gate, recurrent_gate, log_decay, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    channels = x.shape[1]
    states = plain_states(state, state_scale, slots, has_state, rounding)
    with torch.cuda.device_of(x):
        _varlen_kernel[(slots.shape[0] * triton.cdiv(channels, _CHANNELS),)](
            x, input_gate, recurrent_gate, log_decay, states.rows, out, cu_seqlens, states.slots, has_state,
            x.stride(0), input_gate.stride(0), recurrent_gate.stride(0), states.rows.stride(0),
            CHANNELS=channels, BT=_TOKENS, BC=_CHANNELS, num_warps=4,
        )  # fmt: skip
    states.commit(cu_seqlens)
    return out


def rg_lru_update(
    state: Tensor,
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUUpdate`. Padding rows give zeros."""
    _check(x, input_gate, recurrent_gate, log_decay, state)
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = min(256, triton.next_power_of_2(channels))
    states = plain_states(state, state_scale, slots, None, rounding)
    with torch.cuda.device_of(x):
        _update_kernel[(rows * triton.cdiv(channels, block),)](
            x, input_gate, recurrent_gate, log_decay, states.rows, out, slots, states.slots,
            x.stride(0), input_gate.stride(0), recurrent_gate.stride(0), states.rows.stride(0),
            CHANNELS=channels, BC=block, num_warps=2,
        )  # fmt: skip
    states.commit(None)
    return out
