"""Mamba-1's scan on GPUs: a program walks one sequence for a block of channels, the state in registers.

Four tokens are loaded before any is computed, so that one memory latency serves all four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import plain_states
from recurra.ops.triton_math import decay_of, silu, step_size
from recurra.types import Chunks

_CHANNELS = 32


@triton.jit
def _row(pointer, t, end, row_stride, column, column_ok):
    """One token's vector as float32, zeros past the sequence's end."""
    return tl.load(pointer + t * row_stride + column, mask=column_ok & (t < end), other=0.0).to(tl.float32)


@triton.jit
def _advance(state, x, dt, bias, A, B, C, live, SOFTPLUS: tl.constexpr):
    """One token: the new state and the raw output. A token past the end leaves the state as it is."""
    step = step_size(dt, bias, 0.0, 0.0, SOFTPLUS, False)
    step = tl.where(live, step, 0.0)
    state = decay_of(step[:, None] * A) * state + (step * x)[:, None] * B[None, :]
    return state, tl.sum(state * C[None, :], axis=1)


@triton.jit
def _finish(y, x, skip, z, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    if HAS_D:
        y += skip * x
    if HAS_Z:
        y *= silu(z)
    return y


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state"])
def _scan_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    ssm_state,
    out,
    cu_seqlens,
    slots,
    has_state,
    x_row,
    dt_row,
    a_row,
    b_row,
    c_row,
    z_row,
    state_slot,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
):
    blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    seq = pid // blocks
    c = (pid % blocks) * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    c_ok, n_ok = c < CHANNELS, n < N
    ok = c_ok[:, None] & n_ok[None, :]
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    if begin == end:
        return
    kept = tl.load(has_state + seq).to(tl.int1)
    slot = tl.load(slots + seq).to(tl.int64)
    tile = ssm_state + slot * state_slot + c[:, None] * N + n[None, :]
    state = tl.load(tile, mask=ok & kept, other=0.0).to(tl.float32)
    a = tl.load(A + c[:, None] * a_row + n[None, :], mask=ok, other=0.0)
    bias = tl.load(dt_bias + c, mask=c_ok, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    skip = tl.load(D + c, mask=c_ok, other=0.0).to(tl.float32) if HAS_D else 0.0

    for t in range(begin, end, 4):
        x0, x1 = _row(x, t, end, x_row, c, c_ok), _row(x, t + 1, end, x_row, c, c_ok)
        x2, x3 = _row(x, t + 2, end, x_row, c, c_ok), _row(x, t + 3, end, x_row, c, c_ok)
        d0, d1 = _row(dt, t, end, dt_row, c, c_ok), _row(dt, t + 1, end, dt_row, c, c_ok)
        d2, d3 = _row(dt, t + 2, end, dt_row, c, c_ok), _row(dt, t + 3, end, dt_row, c, c_ok)
        b0, b1 = _row(B, t, end, b_row, n, n_ok), _row(B, t + 1, end, b_row, n, n_ok)
        b2, b3 = _row(B, t + 2, end, b_row, n, n_ok), _row(B, t + 3, end, b_row, n, n_ok)
        c0, c1 = _row(C, t, end, c_row, n, n_ok), _row(C, t + 1, end, c_row, n, n_ok)
        c2, c3 = _row(C, t + 2, end, c_row, n, n_ok), _row(C, t + 3, end, c_row, n, n_ok)
        z0, z1, z2, z3 = x0, x1, x2, x3
        if HAS_Z:
            z0, z1 = _row(z, t, end, z_row, c, c_ok), _row(z, t + 1, end, z_row, c, c_ok)
            z2, z3 = _row(z, t + 2, end, z_row, c, c_ok), _row(z, t + 3, end, z_row, c, c_ok)
        state, y0 = _advance(state, x0, d0, bias, a, b0, c0, True, SOFTPLUS)
        state, y1 = _advance(state, x1, d1, bias, a, b1, c1, t + 1 < end, SOFTPLUS)
        state, y2 = _advance(state, x2, d2, bias, a, b2, c2, t + 2 < end, SOFTPLUS)
        state, y3 = _advance(state, x3, d3, bias, a, b3, c3, t + 3 < end, SOFTPLUS)
        y0, y1 = _finish(y0, x0, skip, z0, HAS_D, HAS_Z), _finish(y1, x1, skip, z1, HAS_D, HAS_Z)
        y2, y3 = _finish(y2, x2, skip, z2, HAS_D, HAS_Z), _finish(y3, x3, skip, z3, HAS_D, HAS_Z)
        y_at = out + t * CHANNELS + c
        tl.store(y_at, y0.to(out.dtype.element_ty), mask=c_ok)
        tl.store(y_at + CHANNELS, y1.to(out.dtype.element_ty), mask=c_ok & (t + 1 < end))
        tl.store(y_at + 2 * CHANNELS, y2.to(out.dtype.element_ty), mask=c_ok & (t + 2 < end))
        tl.store(y_at + 3 * CHANNELS, y3.to(out.dtype.element_ty), mask=c_ok & (t + 3 < end))
    tl.store(tile, state.to(ssm_state.dtype.element_ty), mask=ok)


def selective_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    dt_softplus: bool = True,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SelectiveScanVarlen`."""
    del chunks  # a sequence is walked whole
    tokens, channels = x.shape
    state_size = A.shape[1]
    for name, tensor in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C), ("z", x if z is None else z)):
        assert tensor.stride(1) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    assert ssm_state.stride()[1:] == (state_size, 1), ssm_state.stride()
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    num_seqs = slots.shape[0]
    if tokens == 0 or num_seqs == 0:
        return out
    gate = x if z is None else z
    states = plain_states(ssm_state, state_scale, slots, has_state, rounding)
    with torch.cuda.device_of(x):
        _scan_kernel[(num_seqs * triton.cdiv(channels, _CHANNELS),)](
            x, dt, A, B, C, A if D is None else D, gate, A if dt_bias is None else dt_bias, states.rows, out,
            cu_seqlens, states.slots, has_state, x.stride(0), dt.stride(0), A.stride(0), B.stride(0), C.stride(0),
            gate.stride(0), states.rows.stride(0),
            CHANNELS=channels, N=state_size, HAS_D=D is not None, HAS_Z=z is not None,
            HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
            BC=_CHANNELS, BN=triton.next_power_of_2(state_size), num_warps=1,
        )  # fmt: skip
    states.commit(cu_seqlens)
    return out
