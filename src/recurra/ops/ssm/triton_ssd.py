"""Mamba-2's chunked scan (SSD) on GPUs: the operator, and its three kernels for float32 activations.

Those for 16 bits are in :mod:`recurra.ops.ssm.triton_ssd_half`.

With c[t] the sum of ``dt * A`` from a chunk's first token to t (included), and S the state before it:

    y[t] = exp(c[t]) * S . C[t] + sum over k <= t of (C[t] . B[k]) * exp(c[t] - c[k]) * dt[k] * x[k]
    S'   = exp(c[last]) * S + sum over k of exp(c[last] - c[k]) * dt[k] * x[k] (outer) B[k]

1. steps: dt and c of every token and head.
2. states: a program carries a tile of one head's state over one sequence, in registers, and
   leaves the state before each chunk in memory.
3. outputs: all chunks at once.

c is a long sum whose differences matter: it is kept as a sum of two floats.
Source: Mamba-2 (Dao and Gu, 2024), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import States, plain_states
from recurra.ops.ssm import triton_ssd_half as half
from recurra.ops.triton_math import step_size
from recurra.types import Chunks

_NO_LIMIT = (0.0, float("inf"))

#: Columns of the widest state whose 16-bit products have been held against float64 on a GPU.
_WIDEST_16_BIT = 128


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["chunk_start", "chunk_length"])
def _steps_kernel(
    dt,
    A,
    dt_bias,
    steps,
    sums,
    tails,
    chunk_start,
    chunk_length,
    tokens,
    low,
    high,
    dt_row,
    dt_head,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
):
    blocks: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    h = (pid % blocks) * BH + tl.arange(0, BH)
    chunk = pid // blocks
    q = tl.arange(0, BQ)
    h_ok = h < H
    ok = (q < tl.load(chunk_length + chunk))[:, None] & h_ok[None, :]
    t = tl.load(chunk_start + chunk).to(tl.int64) + q
    raw = tl.load(dt + t[:, None] * dt_row + h[None, :] * dt_head, mask=ok, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + h, mask=h_ok, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
    step = step_size(raw, bias, low, high, SOFTPLUS, LIMITED)
    product = tl.where(ok, step * tl.load(A + h, mask=h_ok, other=0.0)[None, :], 0.0)
    at = h[None, :].to(tl.int64) * tokens + t[:, None]
    tl.store(steps + at, step, mask=ok)
    total = tl.cumsum(product.to(tl.float64), axis=0)
    head = total.to(tl.float32)
    tl.store(sums + at, head, mask=ok)
    tl.store(tails + at, (total - head.to(tl.float64)).to(tl.float32), mask=ok)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state", "cu_chunks"],
)
def _states_kernel(
    x,
    B,
    steps,
    sums,
    tails,
    ssm_state,
    before,
    cu_seqlens,
    slots,
    has_state,
    cu_chunks,
    tokens,
    x_row,
    x_head,
    b_row,
    b_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    Q: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    n_blocks: tl.constexpr = (N + BN - 1) // BN
    p_blocks: tl.constexpr = (P + BP - 1) // BP
    parts: tl.constexpr = (Q + BT - 1) // BT  # pieces of a chunk, each one step of the loop
    pid = tl.program_id(0)
    n = (pid % n_blocks) * BN + tl.arange(0, BN)
    p = ((pid // n_blocks) % p_blocks) * BP + tl.arange(0, BP)
    h = (pid // (n_blocks * p_blocks)) % H
    seq = pid // (n_blocks * p_blocks * H)
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    if begin == end:
        return
    p_ok, n_ok = p < P, n < N
    ok = p_ok[:, None] & n_ok[None, :]
    inner = p[:, None] * N + n[None, :]
    kept = tl.load(has_state + seq).to(tl.int1)
    slot_at = ssm_state + tl.load(slots + seq).to(tl.int64) * state_slot + h * (P * N)
    acc = tl.load(slot_at + inner, mask=ok & kept, other=0.0).to(tl.float32)
    first_chunk = tl.load(cu_chunks + seq).to(tl.int64)
    by_head = h.to(tl.int64) * tokens
    length = (end - begin).to(tl.int32)
    count = (length // Q) * parts + (length % Q + BT - 1) // BT
    i_t = tl.arange(0, BT)
    for i in range(count):
        chunk = i // parts
        part = i % parts
        start = begin + chunk * Q + part * BT
        stop = tl.minimum(tl.minimum(start + BT, begin + (chunk + 1) * Q), end)
        # The state before a first chunk without history is zero: nobody reads it.
        read_later = (part == 0) & ((chunk > 0) | kept)
        before_at = before + (first_chunk + chunk) * (H * P * N) + h * (P * N)
        tl.store(before_at + inner, acc.to(before.dtype.element_ty), mask=ok & read_later)
        t = start + i_t
        t_ok = t < stop
        last = tl.load(sums + by_head + stop - 1)
        previous = tl.load(sums + by_head + start - 1, mask=part > 0, other=0.0)
        to_end = last - tl.load(sums + by_head + t, mask=t_ok, other=0.0)
        whole = last - previous
        last_tail = tl.load(tails + by_head + stop - 1)
        to_end += last_tail - tl.load(tails + by_head + t, mask=t_ok, other=0.0)
        whole += last_tail - tl.load(tails + by_head + start - 1, mask=part > 0, other=0.0)
        weight = tl.exp(to_end) * tl.load(steps + by_head + t, mask=t_ok, other=0.0)
        # 64-bit offsets stay scalar: inside a tile 32 bits suffice, at half the registers.
        x_at = x + start * x_row + h * x_head
        b_at = B + start * b_row + (h // HEADS_A_GROUP) * b_group
        xt = tl.load(
            x_at + (i_t[None, :] * x_row + p[:, None]), mask=p_ok[:, None] & t_ok[None, :], other=0.0
        )
        b = tl.load(b_at + (i_t[:, None] * b_row + n[None, :]), mask=t_ok[:, None] & n_ok[None, :], other=0.0)
        weighted = (xt.to(tl.float32) * weight[None, :]).to(b.dtype)
        acc = tl.dot(weighted, b, acc * tl.exp(whole), input_precision="ieee")
    tl.store(slot_at + inner, acc.to(ssm_state.dtype.element_ty), mask=ok)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "has_state", "chunk_seq", "chunk_start", "chunk_length"],
)
def _outputs_kernel(
    x,
    B,
    C,
    D,
    steps,
    sums,
    tails,
    before,
    out,
    cu_seqlens,
    has_state,
    chunk_seq,
    chunk_start,
    chunk_length,
    tokens,
    x_row,
    x_head,
    b_row,
    b_group,
    c_row,
    c_group,
    d_head,
    d_dim,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    HAS_D: tl.constexpr,
    TILES: tl.constexpr,  # pieces of BT rows in a chunk
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    p_blocks: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)  # heads go fastest, so that those of a group share C and B in the cache
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    h = (pid // p_blocks) % H
    tile = (pid // (p_blocks * H)) % TILES
    chunk = (pid // (p_blocks * H * TILES)).to(tl.int64)
    length = tl.load(chunk_length + chunk)
    if tile * BT >= length:
        return
    start = tl.load(chunk_start + chunk).to(tl.int64)
    seq = tl.load(chunk_seq + chunk)
    group = h // HEADS_A_GROUP
    m = tile * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    m_ok, p_ok = m < length, p < P
    by_head = h.to(tl.int64) * tokens + start
    # 64-bit offsets stay scalar: inside a chunk 32 bits suffice, at half the registers.
    x_at = x + start * x_row + h * x_head
    b_base = B + start * b_row + group * b_group
    c_base = C + start * c_row + group * c_group
    c_inner = m[:, None] * c_row + n[None, :]
    c_sum = tl.load(sums + by_head + m, mask=m_ok, other=0.0)
    acc = tl.zeros((BT, BP), tl.float32)
    carried = (start > tl.load(cu_seqlens + seq)) | tl.load(has_state + seq).to(tl.int1)
    if carried:
        s_base = before + chunk * (H * P * N) + h * (P * N)
        s_inner = p[None, :] * N + n[:, None]
        for n0 in tl.static_range(0, N, BN):
            n_ok = n0 + n < N
            c = tl.load(c_base + (c_inner + n0), mask=m_ok[:, None] & n_ok[None, :], other=0.0)
            s = tl.load(s_base + (s_inner + n0), mask=n_ok[:, None] & p_ok[None, :], other=0.0)
            acc = tl.dot(c, s.to(c.dtype), acc, input_precision="ieee")
        acc *= tl.exp(c_sum)[:, None]

    for k0 in range(0, tl.minimum((tile + 1) * BT, length), BT):
        k = k0 + tl.arange(0, BT)
        k_ok = k < length
        b_inner = k[None, :] * b_row + n[:, None]
        scores = tl.zeros((BT, BT), tl.float32)
        for n0 in tl.static_range(0, N, BN):
            n_ok = n0 + n < N
            c = tl.load(c_base + (c_inner + n0), mask=m_ok[:, None] & n_ok[None, :], other=0.0)
            b = tl.load(b_base + (b_inner + n0), mask=n_ok[:, None] & k_ok[None, :], other=0.0)
            scores = tl.dot(c, b, scores, input_precision="ieee")
        between = c_sum[:, None] - tl.load(sums + by_head + k, mask=k_ok, other=0.0)[None, :]
        c_tail = tl.load(tails + by_head + m, mask=m_ok, other=0.0)
        between += c_tail[:, None] - tl.load(tails + by_head + k, mask=k_ok, other=0.0)[None, :]
        step = tl.load(steps + by_head + k, mask=k_ok, other=0.0)
        past = (m[:, None] >= k[None, :]) & m_ok[:, None]
        weight = tl.where(past, tl.exp(tl.minimum(between, 0.0)) * step[None, :], 0.0)
        xk = tl.load(x_at + (k[:, None] * x_row + p[None, :]), mask=k_ok[:, None] & p_ok[None, :], other=0.0)
        acc = tl.dot((scores * weight).to(xk.dtype), xk, acc, input_precision="ieee")

    ok = m_ok[:, None] & p_ok[None, :]
    if HAS_D:
        skip = tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32)
        xm = tl.load(x_at + (m[:, None] * x_row + p[None, :]), mask=ok, other=0.0)
        acc += skip[None, :] * xm.to(tl.float32)
    y_at = out + start * (H * P) + h * P
    tl.store(y_at + (m[:, None] * (H * P) + p[None, :]), acc.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Block sizes: tokens, head dim, state columns of the states and of the outputs kernel.

    The products are ordinary multiplications (tf32 would cost three digits), for which small tiles compile
    and run best.
    """

    tokens: int
    dim: int
    state: int
    inner: int

    @classmethod
    def choose(cls, chunk: int, head_dim: int, state_size: int) -> _Tiles:
        def fit(size: int, most: int) -> int:
            return min(max(16, int(triton.next_power_of_2(size))), most)

        return cls(fit(chunk, 32), fit(head_dim, 32), fit(state_size, 32), fit(state_size, 64))


def mamba_chunk_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SSDVarlen`. States wider than 128 are computed in float32."""
    tokens, heads, dim = x.shape
    groups, state_size = B.shape[1:]
    if state_size > _WIDEST_16_BIT and x.dtype != torch.float32:
        return mamba_chunk_scan_varlen(
            x.float(), dt, A, B.float(), C.float(), D, dt_bias, ssm_state, cu_seqlens, slots, has_state, chunks,
            dt_softplus=dt_softplus, dt_limit=dt_limit, state_scale=state_scale, rounding=rounding,
        ).to(x.dtype)  # fmt: skip
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        assert tensor.dtype == x.dtype, f"{name} is {tensor.dtype}, x is {x.dtype}"
        assert tensor.stride(2) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
        assert tensor.stride(0) * chunks.size < 2**31, f"{name} strides {tensor.stride()}: rows too far apart"
    assert heads % groups == 0, (x.shape, B.shape)
    assert ssm_state.stride()[1:] == (dim * state_size, state_size, 1), ssm_state.stride()
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    num_chunks = chunks.seq.shape[0]
    if num_chunks == 0:
        return out
    states = plain_states(ssm_state, state_scale, slots, has_state, rounding)
    if x.dtype == torch.float32:
        _scan(
            x, dt, A, B, C, D, dt_bias, out, states, cu_seqlens, has_state, chunks, dt_softplus, dt_limit
        )  # fmt: skip
    else:
        half.scan(
            x, dt, A, B, C, D, dt_bias, out, states, cu_seqlens, has_state, chunks, dt_softplus, dt_limit
        )  # fmt: skip
    states.commit(cu_seqlens)
    return out


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    states: States,
    cu_seqlens: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> None:
    """The scan in float32, of at least one chunk."""
    tokens, heads, dim = x.shape
    groups, state_size = B.shape[1:]
    num_chunks = chunks.seq.shape[0]
    tiles = _Tiles.choose(chunks.size, dim, state_size)
    # Apart, so that each starts at an aligned address whatever the number of tokens: alignment is part of
    # the key by which kernels are compiled.
    steps = torch.empty((heads, tokens), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(steps)
    tails = torch.empty_like(sums)
    before = torch.empty((num_chunks, heads, dim, state_size), dtype=x.dtype, device=x.device)
    skip = A if D is None else D
    with torch.cuda.device_of(x):
        _steps_kernel[(num_chunks * triton.cdiv(heads, 16),)](
            dt, A, A if dt_bias is None else dt_bias, steps, sums, tails, chunks.start, chunks.length, tokens,
            *dt_limit, dt.stride(0), dt.stride(1),
            H=heads, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, LIMITED=dt_limit != _NO_LIMIT,
            BQ=triton.next_power_of_2(chunks.size), BH=16, num_warps=4,
        )  # fmt: skip
        dim_blocks = triton.cdiv(dim, tiles.dim)
        programs = states.slots.shape[0] * heads * dim_blocks * triton.cdiv(state_size, tiles.state)
        _states_kernel[(programs,)](
            x, B, steps, sums, tails, states.rows, before, cu_seqlens, states.slots, has_state, chunks.cu_chunks,
            tokens, x.stride(0), x.stride(1), B.stride(0), B.stride(1), states.rows.stride(0),
            H=heads, P=dim, N=state_size, HEADS_A_GROUP=heads // groups, Q=chunks.size, BT=tiles.tokens, BP=tiles.dim, BN=tiles.state,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        pieces = triton.cdiv(chunks.size, tiles.tokens)
        _outputs_kernel[(num_chunks * pieces * heads * dim_blocks,)](
            x, B, C, skip, steps, sums, tails, before, out, cu_seqlens, has_state,
            chunks.seq, chunks.start, chunks.length, tokens,
            x.stride(0), x.stride(1), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
            skip.stride(0), skip.stride(1) if skip.dim() == 2 else 0,
            H=heads, P=dim, N=state_size, HEADS_A_GROUP=heads // groups, HAS_D=D is not None,
            TILES=pieces, BT=tiles.tokens, BP=tiles.dim,
            BN=tiles.inner, num_warps=4, num_stages=2,
        )  # fmt: skip
