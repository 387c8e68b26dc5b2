"""What the chunked gated delta rule needs before any state is known, for every piece of BT tokens.

1. prepare: sums G of log decays, and queries and keys scaled by exp(G), keys by exp(G_last - G).
2. scores: A, and the system I + M by blocks of 16 rows: off the diagonal M itself, on it the *inverse* of
   the block, by substitution. (A product of powers of M would need fewer steps, and overflows.)
3. solve: exp(G) * beta * K and beta * V go through the system, block row by block row.

There is a decay for each channel. Products are taken around the sum R before a block of rows,
``exp(G_i - R) * exp(R - G_j)``, and inside a block as they stand: no exponent is ever positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 16  # rows of a block of the system


@triton.jit
def _rows(pointer, row_stride, t, t_ok, c, c_ok, eps, NORM: tl.constexpr):
    """A tile of queries or keys as float32, each row over its norm if asked."""
    at = pointer + (t[:, None] * row_stride + c[None, :])
    x = tl.load(at, mask=t_ok[:, None] & c_ok[None, :], other=0.0).to(tl.float32)
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x, axis=1) + eps)[:, None]
    return x


@triton.jit
def _difference(a, a_tail, b, b_tail):
    """a - b, at most zero, each being a sum of two floats."""
    return tl.minimum((a - b) + (a_tail - b_tail), 0.0)


@triton.jit(do_not_specialize_on_alignment=["chunk_start", "chunk_length"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    sums,
    tails,
    entering_q,
    entering_k,
    leaving_k,
    totals,
    chunk_start,
    chunk_length,
    scale,
    eps,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    g_head,
    g_channel,
    beta_row,
    beta_head,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,  # pieces of a chunk
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    pid = tl.program_id(0)
    h = pid % H
    part = (pid // H) % PARTS
    chunk = (pid // (H * PARTS)).to(tl.int64)
    size = tl.minimum(tl.load(chunk_length + chunk) - part * BT, BT)
    if size <= 0:
        return
    start = tl.load(chunk_start + chunk).to(tl.int64) + part * BT
    t = tl.arange(0, BT)
    c = tl.arange(0, BK)
    t_ok, c_ok = t < size, c < K
    last = (t == size - 1)[:, None]
    gate = g + start * g_row + h * g_head
    ok = t_ok[:, None] & c_ok[None, :]
    log = tl.load(gate + (t[:, None] * g_row + c[None, :] * g_channel), mask=ok, other=0.0)
    at = (start * H + h) * K + (t[:, None] * (H * K) + c[None, :])
    exact = tl.cumsum(log.to(tl.float64), axis=0)
    head = exact.to(tl.float32)
    tail = (exact - head.to(tl.float64)).to(tl.float32)
    tl.store(sums + at, head, mask=ok)
    tl.store(tails + at, tail, mask=ok)
    whole = tl.sum(tl.where(last, head, 0.0), axis=0)
    whole_tail = tl.sum(tl.where(last, tail, 0.0), axis=0)
    total_at = totals + ((chunk * PARTS + part) * H + h) * K + c
    tl.store(total_at, tl.exp(whole), mask=c_ok)
    enter = tl.exp(head)
    leave = tl.exp(_difference(whole[None, :], whole_tail[None, :], head, tail))

    key_head = h // HEADS_A_KEY
    strength = tl.load(beta + start * beta_row + h * beta_head + t * beta_row, mask=t_ok, other=0.0)
    query = _rows(q + start * q_row + key_head * q_head, q_row, t, t_ok, c, c_ok, eps, NORM)
    key = _rows(k + start * k_row + key_head * k_head, k_row, t, t_ok, c, c_ok, eps, NORM)
    inner = (start * H + h) * K + (t[:, None] * (H * K) + c[None, :])
    both = t_ok[:, None] & c_ok[None, :]
    kind = entering_q.dtype.element_ty
    tl.store(entering_q + inner, (query * enter * scale).to(kind), mask=both)
    tl.store(entering_k + inner, (key * enter * strength.to(tl.float32)[:, None]).to(kind), mask=both)
    tl.store(leaving_k + inner, (key * leave).to(kind), mask=both)


@triton.jit(do_not_specialize_on_alignment=["chunk_start", "chunk_length"])
def scores_kernel(
    q,
    k,
    beta,
    sums,
    tails,
    weights,
    system,
    chunk_start,
    chunk_length,
    scale,
    eps,
    q_row,
    q_head,
    k_row,
    k_head,
    beta_row,
    beta_head,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,  # rows of a block
    BK: tl.constexpr,
):
    blocks: tl.constexpr = BT // BR
    pid = tl.program_id(0)
    block = pid % blocks
    h = (pid // blocks) % H
    part = (pid // (blocks * H)) % PARTS
    chunk = (pid // (blocks * H * PARTS)).to(tl.int64)
    size = tl.load(chunk_length + chunk) - part * BT
    if block * BR >= size:
        return
    start = tl.load(chunk_start + chunk).to(tl.int64) + part * BT
    r = tl.arange(0, BR)
    c = tl.arange(0, BK)
    c_ok = c < K
    i = block * BR + r
    i_ok = i < size
    key_head = h // HEADS_A_KEY
    q_at = q + start * q_row + key_head * q_head
    k_at = k + start * k_row + key_head * k_head
    query = _rows(q_at, q_row, i, i_ok, c, c_ok, eps, NORM) * scale
    key = _rows(k_at, k_row, i, i_ok, c, c_ok, eps, NORM)
    strength = tl.load(beta + start * beta_row + h * beta_head + i * beta_row, mask=i_ok, other=0.0)
    key_beta = key * strength.to(tl.float32)[:, None]
    kind = q.dtype.element_ty
    g_at = sums + (start * H + h) * K
    e_at = tails + (start * H + h) * K
    mine = i[:, None] * (H * K) + c[None, :]
    own_ok = i_ok[:, None] & c_ok[None, :]
    own = tl.load(g_at + mine, mask=own_ok, other=0.0)
    own_tail = tl.load(e_at + mine, mask=own_ok, other=0.0)
    before = (block * BR - 1) * (H * K) + c
    some = c_ok & (block > 0)
    pivot = tl.load(g_at + before, mask=some, other=0.0)
    pivot_tail = tl.load(e_at + before, mask=some, other=0.0)
    enter = tl.exp(_difference(own, own_tail, pivot[None, :], pivot_tail[None, :]))
    left_q, left_k = (query * enter).to(kind), (key_beta * enter).to(kind)
    out_at = (start * H + h) * BT + i[:, None] * (H * BT) + r[None, :]

    for b in range(block):
        j = b * BR + r
        other = _rows(k_at, k_row, j, j < size, c, c_ok, eps, NORM)
        theirs = j[:, None] * (H * K) + c[None, :]
        far = tl.load(g_at + theirs, mask=c_ok[None, :], other=0.0)
        far_tail = tl.load(e_at + theirs, mask=c_ok[None, :], other=0.0)
        other = other * tl.exp(_difference(pivot[None, :], pivot_tail[None, :], far, far_tail))
        right = tl.trans(other.to(kind))
        a = tl.dot(left_q, right, input_precision=PRECISION)
        m = tl.dot(left_k, right, input_precision=PRECISION)
        tl.store(weights + out_at + b * BR, a.to(weights.dtype.element_ty), mask=i_ok[:, None])
        tl.store(system + out_at + b * BR, m, mask=i_ok[:, None])

    # The block on the diagonal.
    a = tl.zeros((BR, BR), tl.float32)
    m = tl.zeros((BR, BR), tl.float32)
    for n in range(BR):
        one = (r == n)[:, None]
        column = (r == n)[None, :]
        far = tl.sum(tl.where(one, own, 0.0), axis=0)[None, :]
        far_tail = tl.sum(tl.where(one, own_tail, 0.0), axis=0)[None, :]
        other = tl.sum(tl.where(one, key, 0.0), axis=0)[None, :]
        share = other * tl.exp(_difference(own, own_tail, far, far_tail))
        a = tl.where(column, tl.sum(query * share, axis=1)[:, None], a)
        m = tl.where(column, tl.sum(key_beta * share, axis=1)[:, None], m)
    a = tl.where(r[:, None] >= r[None, :], a, 0.0)
    m = tl.where(r[:, None] > r[None, :], m, 0.0)
    inverse = (r[:, None] == r[None, :]).to(tl.float32)
    for n in range(1, BR):
        one = (r == n)[:, None]
        factors = tl.sum(tl.where(one, m, 0.0), axis=0)
        inverse -= tl.where(one, tl.sum(factors[:, None] * inverse, axis=0)[None, :], 0.0)
    tl.store(weights + out_at + block * BR, a.to(weights.dtype.element_ty), mask=i_ok[:, None])
    tl.store(system + out_at + block * BR, inverse, mask=i_ok[:, None])


@triton.jit(do_not_specialize_on_alignment=["chunk_start", "chunk_length"])
def solve_kernel(
    v,
    beta,
    system,
    solved_k,
    solved_v,
    chunk_start,
    chunk_length,
    v_row,
    v_head,
    beta_row,
    beta_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """``solved_k`` holds its right-hand side, beta * exp(G) * K, and is solved in place."""
    k_blocks: tl.constexpr = (K + BC - 1) // BC
    columns: tl.constexpr = k_blocks + (V + BC - 1) // BC
    pid = tl.program_id(0)
    column = pid % columns
    h = (pid // columns) % H
    part = (pid // (columns * H)) % PARTS
    chunk = (pid // (columns * H * PARTS)).to(tl.int64)
    size = tl.load(chunk_length + chunk) - part * BT
    if size <= 0:
        return
    start = tl.load(chunk_start + chunk).to(tl.int64) + part * BT
    t = tl.arange(0, BT)
    t_ok = t < size
    of_keys = column < k_blocks
    c = tl.where(of_keys, column, column - k_blocks) * BC + tl.arange(0, BC)
    c_ok = c < tl.where(of_keys, K, V)
    ok = t_ok[:, None] & c_ok[None, :]
    k_at = solved_k + (start * H + h) * K + (t[:, None] * (H * K) + c[None, :])
    v_at = v + start * v_row + h * v_head + (t[:, None] * v_row + c[None, :])
    strength = tl.load(beta + start * beta_row + h * beta_head + t * beta_row, mask=t_ok, other=0.0)
    wanted = tl.load(k_at, mask=ok & of_keys, other=0.0).to(tl.float32)
    values = tl.load(v_at, mask=ok & (column >= k_blocks), other=0.0).to(tl.float32)
    wanted += values * strength.to(tl.float32)[:, None]

    # What lies above the diagonal blocks was never written.
    block_i, block_j = t[:, None] // BR, t[None, :] // BR
    s_at = system + (start * H + h) * BT + (t[:, None] * (H * BT) + t[None, :])
    below = tl.load(s_at, mask=t_ok[:, None] & (block_j < block_i), other=0.0)
    diagonal = tl.load(s_at, mask=t_ok[:, None] & (block_j == block_i), other=0.0)
    solved = tl.zeros((BT, BC), tl.float32)
    for b in range(BT // BR):
        left = wanted - tl.dot(below, solved, input_precision=PRECISION)
        step = tl.dot(diagonal, left, input_precision=PRECISION)
        solved = tl.where((t // BR == b)[:, None], step, solved)
    u_at = solved_v + (start * H + h) * V + (t[:, None] * (H * V) + c[None, :])
    kind = solved_v.dtype.element_ty
    tl.store(k_at, solved.to(kind), mask=ok & of_keys)
    tl.store(u_at, solved.to(kind), mask=ok & (column >= k_blocks))
