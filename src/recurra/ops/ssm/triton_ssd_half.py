"""Mamba-2's chunked scan (SSD) on GPUs for 16-bit activations, in three kernels.

With c[t] the sum of ``dt * A`` from a chunk's first token to t (included), S the state before the chunk, and
k'[t] = c[t] - log(dt[t]), so that a decay and a step are one exponential:

    y[t] = exp(c[t]) * S . C[t] + sum over k <= t of (C[t] . B[k]) * exp(c[t] - k'[k]) * x[k]
    S'   = exp(c[last]) * S + sum over k of exp(c[last] - k'[k]) * x[k] (outer) B[k]

1. sums: c and k' of every token and head, in powers of two (which the hardware's exponential takes).
2. states: a program carries a tile of one head's state over one sequence, in registers and float32, and
   leaves the state before each chunk in memory, in the activations' dtype (in which it is multiplied).
3. outputs: a program has some rows of a chunk and computes C.B once for several heads of a group, then runs
   over those heads while the next one's state and x come in.

Least work, T tokens: bytes 2 T (2 H P + H + 2 G N), operations T H (4 P N + Q P). What is above it: x is read
twice, and each chunk's states are written and read once, 4 T H P N / Q bytes. Hence chunks of 128 tokens,
whatever the caller's: smaller ones are joined, larger ones split.
Source: Mamba-2 (Dao and Gu, 2024), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding.triton import States
from recurra.ops.triton_math import step_size
from recurra.types import Chunks

#: Tokens of these kernels' own chunks.
TOKENS = 128

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _own_chunk(
    at, cu_seqlens, cu_chunks, chunk_seq, SIZE: tl.constexpr, JOIN: tl.constexpr, SPLIT: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """Sequence, first token and tokens of chunk ``at``; no tokens if an earlier one covers it."""
    chunk = at // SPLIT
    seq = tl.load(chunk_seq + chunk)
    begin = tl.load(cu_seqlens + seq)
    index = chunk - tl.load(cu_chunks + seq)
    start = begin + index * SIZE + (at % SPLIT) * BQ
    stop = tl.minimum(tl.minimum(start + BQ, begin + (index + JOIN) * SIZE), tl.load(cu_seqlens + seq + 1))
    return seq, start, tl.where(index % JOIN == 0, stop - start, 0)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "cu_chunks", "chunk_seq"],
)
def _sums_kernel(
    dt,
    A,
    dt_bias,
    rows,
    columns,
    cu_seqlens,
    cu_chunks,
    chunk_seq,
    tokens,
    low,
    high,
    dt_row,
    dt_head,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    SIZE: tl.constexpr,
    JOIN: tl.constexpr,
    SPLIT: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
):
    blocks: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    _, start, length = _own_chunk(pid // blocks, cu_seqlens, cu_chunks, chunk_seq, SIZE, JOIN, SPLIT, BQ)
    if length <= 0:
        return
    h = (pid % blocks) * BH + tl.arange(0, BH)
    q = tl.arange(0, BQ)
    h_ok = h < H
    ok = (q < length)[:, None] & h_ok[None, :]
    t = start.to(tl.int64) + q
    raw = tl.load(dt + t[:, None] * dt_row + h[None, :] * dt_head, mask=ok, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + h, mask=h_ok, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
    step = step_size(raw, bias, low, high, SOFTPLUS, LIMITED)
    rate = tl.load(A + h, mask=h_ok, other=0.0)[None, :] * _LOG2_E
    total = tl.cumsum(tl.where(ok, step * rate, 0.0), axis=0)
    at = h[None, :].to(tl.int64) * tokens + t[:, None]
    tl.store(rows + at, total, mask=ok)
    tl.store(columns + at, total - tl.log2(step), mask=ok)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state", "cu_chunks"],
)
def _states_kernel(
    x,
    B,
    rows,
    columns,
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
    SIZE: tl.constexpr,
    JOIN: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNED: tl.constexpr,  # the accumulator is (N, P)
    BQ: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    n_blocks: tl.constexpr = (N + BN - 1) // BN
    p_blocks: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    n = (pid % n_blocks) * BN + tl.arange(0, BN)
    p = ((pid // n_blocks) % p_blocks) * BP + tl.arange(0, BP)
    h = (pid // (n_blocks * p_blocks)) % H
    seq = pid // (n_blocks * p_blocks * H)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin == end:
        return
    p_ok, n_ok = p < P, n < N
    if TURNED:
        ok = n_ok[:, None] & p_ok[None, :]
        inner = p[None, :] * N + n[:, None]
    else:
        ok = p_ok[:, None] & n_ok[None, :]
        inner = p[:, None] * N + n[None, :]
    kept = tl.load(has_state + seq).to(tl.int1)
    slot_at = ssm_state + tl.load(slots + seq).to(tl.int64) * state_slot + h * (P * N)
    acc = tl.load(slot_at + inner, mask=ok & kept, other=0.0).to(tl.float32)
    before += h * (P * N)
    first = tl.load(cu_chunks + seq).to(tl.int64) * SPLIT
    rows += h.to(tl.int64) * tokens
    columns += h.to(tl.int64) * tokens
    x += h * x_head
    B += (h // HEADS_A_GROUP) * b_group
    i_t = tl.arange(0, BQ)
    count = (end - begin + (SIZE * JOIN - 1)) // (SIZE * JOIN) * SPLIT
    # A chunk's whole decay is fetched a chunk ahead: the loop waits for no number.
    last = tl.load(rows + tl.minimum(tl.minimum(begin + BQ, begin + SIZE * JOIN), end) - 1)
    for i in tl.range(0, count, num_stages=STAGES):
        base = begin + (i // SPLIT) * (SIZE * JOIN)
        start = base + (i % SPLIT) * BQ
        stop = tl.minimum(tl.minimum(start + BQ, base + SIZE * JOIN), end)
        # 64-bit offsets stay scalar: inside a tile 32 bits suffice, at half the registers.
        x_at = x + start.to(tl.int64) * x_row
        b_at = B + start.to(tl.int64) * b_row
        t_ok = i_t < stop - start
        column = tl.load(columns + start + i_t, mask=t_ok, other=float("inf"))
        b = tl.load(b_at + (i_t[:, None] * b_row + n[None, :]), mask=t_ok[:, None] & n_ok[None, :], other=0.0)
        weight = tl.exp2(last - column)
        row_at = before + (first + (i // SPLIT) * (JOIN * SPLIT) + i % SPLIT) * (H * P * N)
        # The state before a first chunk without history is zero: nobody reads it.
        tl.store(row_at + inner, acc.to(before.dtype.element_ty), mask=ok & ((i > 0) | kept))
        acc *= tl.where(stop > start, tl.exp2(last), 1.0)
        if TURNED:
            xt = tl.load(
                x_at + (i_t[:, None] * x_row + p[None, :]), mask=t_ok[:, None] & p_ok[None, :], other=0.0
            )
            acc = tl.dot(tl.trans(b), (xt.to(tl.float32) * weight[:, None]).to(b.dtype), acc)
        else:
            xt = tl.load(
                x_at + (i_t[None, :] * x_row + p[:, None]), mask=p_ok[:, None] & t_ok[None, :], other=0.0
            )
            acc = tl.dot((xt.to(tl.float32) * weight[None, :]).to(b.dtype), b, acc)
        j = i + 1
        base = begin + (j // SPLIT) * (SIZE * JOIN)
        ahead = tl.minimum(tl.minimum(base + (j % SPLIT + 1) * BQ, base + SIZE * JOIN), end)
        last = tl.load(rows + ahead - 1)
    tl.store(slot_at + inner, acc.to(ssm_state.dtype.element_ty), mask=ok)


@triton.jit
def _outputs_of_heads(
    x, c, near, far, D, rows, columns, before, out, first, tokens, x_row, x_head, d_head, d_dim, m, m_ok, p, p_ok,
    n, n_ok, carried, HAS_D: tl.constexpr, LATE: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second half of a chunk (``LATE``) looks back at the first by way of the decay at its end.

    There exp(c[t] - k'[k]) = exp(c[t] - c[mid]) * exp(c[mid] - k'[k]), both exponents of one sign: an exponential
    a token instead of one a pair. The same split would overflow for pairs within a half.
    """
    k = tl.arange(0, BM)
    for j in tl.range(0, HEADS, num_stages=STAGES):
        h = first + j
        by_head = h.to(tl.int64) * tokens
        x_at = x + h * x_head
        row = tl.load(rows + by_head + m, mask=m_ok, other=0.0)
        column = tl.load(columns + by_head + m, mask=m_ok, other=float("inf"))
        s = tl.load(
            before + h * (P * N) + (p[None, :] * N + n[:, None]),
            mask=n_ok[:, None] & (p_ok & carried)[None, :], other=0.0,
        )  # fmt: skip
        xm = tl.load(x_at + (m[:, None] * x_row + p[None, :]), mask=m_ok[:, None] & p_ok[None, :], other=0.0)
        if LATE:
            xk = tl.load(x_at + (k[:, None] * x_row + p[None, :]), mask=p_ok[None, :], other=0.0)
            mid = tl.load(rows + by_head + (BM - 1))
            decayed = tl.exp2(mid - tl.load(columns + by_head + k))
            acc = tl.dot(c, s)
            acc *= tl.exp2(mid)
            acc = tl.dot(far, (xk.to(tl.float32) * decayed[:, None]).to(x.dtype.element_ty), acc)
            acc *= tl.exp2(row - mid)[:, None]
        else:
            acc = tl.dot(c, s)
            acc *= tl.exp2(row)[:, None]
        # Above the diagonal the exponent is anything, and times zero it must be zero.
        weight = tl.exp2(tl.minimum(row[:, None] - column[None, :], 126.0))
        acc = tl.dot((near * weight).to(x.dtype.element_ty), xm, acc)
        if HAS_D:
            skip = tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32)
            acc += skip[None, :] * xm.to(tl.float32)
        tl.store(
            out + h * P + (m[:, None] * (H * P) + p[None, :]), acc.to(out.dtype.element_ty),
            mask=m_ok[:, None] & p_ok[None, :],
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["cu_seqlens", "has_state", "cu_chunks", "chunk_seq"],
)
def _outputs_kernel(
    x,
    B,
    C,
    D,
    rows,
    columns,
    before,
    out,
    cu_seqlens,
    has_state,
    cu_chunks,
    chunk_seq,
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
    SIZE: tl.constexpr,
    JOIN: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PACKED: tl.constexpr,  # C.B near the diagonal is kept in 16 bits
    BQ: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    BM: tl.constexpr = BQ // 2
    p_blocks: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    tile = 1 - pid % 2
    p = ((pid // 2) % p_blocks) * BP + tl.arange(0, BP)
    first = ((pid // (2 * p_blocks)) % (H // HEADS)) * HEADS
    at = pid // (2 * p_blocks * (H // HEADS))
    seq, start, length = _own_chunk(at, cu_seqlens, cu_chunks, chunk_seq, SIZE, JOIN, SPLIT, BQ)
    if tile * BM >= length:
        return
    carried = (start > tl.load(cu_seqlens + seq)) | tl.load(has_state + seq).to(tl.int1)
    group = first // HEADS_A_GROUP
    start = start.to(tl.int64)
    k = tl.arange(0, BM)
    m = tile * BM + k
    n = tl.arange(0, BN)
    m_ok, p_ok, n_ok = m < length, p < P, n < N
    # 64-bit offsets stay scalar: inside a chunk 32 bits suffice, at half the registers.
    c_at = C + start * c_row + group * c_group
    b_at = B + start * b_row + group * b_group
    c = tl.load(c_at + (m[:, None] * c_row + n[None, :]), mask=m_ok[:, None] & n_ok[None, :], other=0.0)
    b = tl.load(b_at + (m[None, :] * b_row + n[:, None]), mask=n_ok[:, None] & m_ok[None, :], other=0.0)
    near = tl.where(k[:, None] >= k[None, :], tl.dot(c, b), 0.0)
    if PACKED:
        near = near.to(x.dtype.element_ty)
    x += start * x_row
    rows += start
    columns += start
    before += at.to(tl.int64) * (H * P * N)
    out += start * (H * P)
    if tile == 1:
        b = tl.load(b_at + (k[None, :] * b_row + n[:, None]), mask=n_ok[:, None], other=0.0)
        far = tl.dot(c, b).to(x.dtype.element_ty)
        _outputs_of_heads(
            x, c, near, far, D, rows, columns, before, out, first, tokens, x_row, x_head, d_head, d_dim, m, m_ok,
            p, p_ok, n, n_ok, carried, HAS_D, True, H, P, N, HEADS, BM, STAGES,
        )  # fmt: skip
    else:
        _outputs_of_heads(
            x, c, near, near, D, rows, columns, before, out, first, tokens, x_row, x_head, d_head, d_dim, m, m_ok,
            p, p_ok, n, n_ok, carried, HAS_D, False, H, P, N, HEADS, BM, STAGES,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks, warps and stages of the states and the outputs kernel.

    Every plan that is chosen was held against float64 on an H200: Triton 3.6 compiled a head-dim block of 32
    with 256 columns into wrong answers, hence head-dim blocks of 64 whatever the shape.

    Attributes:
        turned: the states kernel's accumulator is (N, P).
        columns: of a state that a program of the states kernel has.
        heads: most heads of a program of the outputs kernel.
        packed: C.B near the diagonal waits in 16 bits.
    """

    turned: bool = False
    columns: int = 64
    state_warps: int = 4
    state_stages: int = 3
    heads: int = 8
    packed: bool = False
    warps: int = 4
    stages: int = 1


#: One plan for every shape: another one would have to be compiled when the first such request comes.
PLAN = Plan()


def scan(
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
    plan: Plan = PLAN,
) -> None:
    """The scan in 16 bits, of at least one chunk and with N <= 128."""
    tokens, heads, dim = x.shape
    groups, size = B.shape[1:]
    join, split = max(1, TOKENS // chunks.size), triton.cdiv(chunks.size, TOKENS)
    count = chunks.seq.shape[0] * split
    share = heads // groups
    many = max(n for n in (1, 2, 4, 8, 16) if n <= plan.heads and share % n == 0)
    # Apart, so that each starts at an aligned address whatever the number of tokens: alignment is part of
    # the key by which kernels are compiled.
    rows = torch.empty((heads, tokens), dtype=torch.float32, device=x.device)
    columns = torch.empty_like(rows)
    before = torch.empty((count, heads, dim, size), dtype=x.dtype, device=x.device)
    skip = A if D is None else D
    wide = 64 if size <= 64 else 128
    p_blocks, n_blocks = triton.cdiv(dim, 64), triton.cdiv(size, min(plan.columns, wide))
    cut = {"SIZE": chunks.size, "JOIN": join, "SPLIT": split, "BQ": TOKENS}
    with torch.cuda.device_of(x):
        _sums_kernel[(count * triton.cdiv(heads, 16),)](
            dt, A, A if dt_bias is None else dt_bias, rows, columns, cu_seqlens, chunks.cu_chunks, chunks.seq,
            tokens, *dt_limit, dt.stride(0), dt.stride(1), H=heads, HAS_BIAS=dt_bias is not None,
            SOFTPLUS=dt_softplus, LIMITED=dt_limit != (0.0, float("inf")), BH=16, num_warps=4, **cut,
        )  # fmt: skip
        _states_kernel[(states.slots.shape[0] * heads * p_blocks * n_blocks,)](
            x, B, rows, columns, states.rows, before, cu_seqlens, states.slots, has_state, chunks.cu_chunks, tokens,
            x.stride(0), x.stride(1), B.stride(0), B.stride(1), states.rows.stride(0),
            H=heads, P=dim, N=size, HEADS_A_GROUP=share, TURNED=plan.turned, BP=64,
            BN=min(plan.columns, wide), STAGES=plan.state_stages, num_warps=plan.state_warps, **cut,
        )  # fmt: skip
        _outputs_kernel[(count * (heads // many) * p_blocks * 2,)](
            x, B, C, skip, rows, columns, before, out, cu_seqlens, has_state, chunks.cu_chunks, chunks.seq,
            tokens, x.stride(0), x.stride(1), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
            skip.stride(0), skip.stride(1) if skip.dim() == 2 else 0,
            H=heads, P=dim, N=size, HEADS_A_GROUP=share, HAS_D=D is not None, HEADS=many, PACKED=plan.packed,
            BP=64, BN=wide, STAGES=plan.stages, num_warps=plan.warps, **cut,
        )  # fmt: skip
