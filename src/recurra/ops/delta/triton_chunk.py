"""The gated delta rule over packed sequences on GPUs: three kernels over all pieces at once, then the scan.

The scan carries a tile of one head's state, all K rows of some columns, over one sequence; each piece of BT
tokens takes four products. How the rule gates shows in nothing but what :mod:`triton_prepare` left in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.delta import NORM_EPS, check_shapes
from recurra.ops.delta.triton_prepare import BLOCK, prepare_kernel, scores_kernel, solve_kernel
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.triton import plain_states
from recurra.types import Chunks


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_state", "cu_chunks"])
def _scan_kernel(
    entering_q,
    solved_k,
    leaving_k,
    solved_v,
    weights,
    totals,
    state,
    out,
    cu_seqlens,
    slots,
    has_state,
    cu_chunks,
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
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    parts: tl.constexpr = (Q + BT - 1) // BT  # pieces of a chunk
    pid = tl.program_id(0)
    vi = (pid % v_blocks) * BV + tl.arange(0, BV)
    h = (pid // v_blocks) % H
    seq = pid // (v_blocks * H)
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    if begin == end:
        return
    ki = tl.arange(0, BK)
    t = tl.arange(0, BT)
    k_ok, v_ok = ki < K, vi < V
    ok = k_ok[:, None] & v_ok[None, :]
    kept = tl.load(has_state + seq).to(tl.int1)
    slot_at = state + tl.load(slots + seq).to(tl.int64) * state_slot + h * (K * V)
    tile = slot_at + (ki[:, None] * V + vi[None, :])
    carried = tl.load(tile, mask=ok & kept, other=0.0).to(tl.float32)
    first_chunk = tl.load(cu_chunks + seq).to(tl.int64)
    length = (end - begin).to(tl.int32)
    count = (length // Q) * parts + (length % Q + BT - 1) // BT
    by_key = t[:, None] * (H * K) + ki[None, :]
    by_value = t[:, None] * (H * V) + vi[None, :]
    by_token = t[:, None] * (H * BT) + t[None, :]
    for n in range(count):
        chunk = n // parts
        offset = (n % parts) * BT
        start = begin + chunk * Q + offset
        size = tl.minimum(tl.minimum(BT, Q - offset), (end - start).to(tl.int32))
        t_ok = t < size
        keys_ok, values_ok = t_ok[:, None] & k_ok[None, :], t_ok[:, None] & v_ok[None, :]
        head = start * H + h
        read_out = tl.load(solved_k + head * K + by_key, mask=keys_ok, other=0.0)
        held = carried.to(read_out.dtype)
        fresh = tl.load(solved_v + head * V + by_value, mask=values_ok, other=0.0).to(tl.float32)
        correction = fresh - tl.dot(read_out, held, input_precision=PRECISION)
        correction = correction.to(read_out.dtype)
        query = tl.load(entering_q + head * K + by_key, mask=keys_ok, other=0.0)
        past = t_ok[:, None] & (t[:, None] >= t[None, :])
        weight = tl.load(weights + head * BT + by_token, mask=past, other=0.0)
        y = tl.dot(query, held, input_precision=PRECISION)
        y = tl.dot(weight, correction, y, input_precision=PRECISION)
        tl.store(out + head * V + by_value, y.to(out.dtype.element_ty), mask=values_ok)
        key = tl.load(leaving_k + head * K + by_key, mask=keys_ok, other=0.0)
        piece = (first_chunk + chunk) * parts + n % parts
        decay = tl.load(totals + (piece * H + h) * K + ki, mask=k_ok, other=0.0)
        carried = tl.dot(tl.trans(key), correction, carried * decay[:, None], input_precision=PRECISION)
    tl.store(tile, carried.to(state.dtype.element_ty), mask=ok)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tokens of a piece, key block (all of K), columns of the solve and of the scan; how products round.

    In float32 products are ordinary multiplications (tf32 would cost three digits), for which smaller tiles
    compile and run better. The triangular system is solved in more digits than the activations have: tf32
    has three more than bfloat16, but no more than float16.
    """

    tokens: int
    key: int
    solve: int
    scan: int
    stages: int
    precision: str
    solve_precision: str

    @classmethod
    def choose(cls, dtype: torch.dtype, chunk: int, key: int, value: int) -> _Tiles:
        exact = dtype == torch.float32

        def fit(size: int, most: int) -> int:
            return min(max(BLOCK, int(triton.next_power_of_2(size))), most)

        return cls(
            fit(chunk, 32 if exact else 64),
            max(BLOCK, triton.next_power_of_2(key)),
            fit(max(key, value), 32 if exact else 64),
            fit(value, 16 if exact else 32),
            1 if exact or key > 128 else 2,  # or shared memory runs out
            "ieee" if exact else "tf32",
            {torch.float32: "ieee", torch.float16: "tf32x3"}.get(dtype, "tf32"),
        )


def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleVarlen`."""
    check_shapes(q, k, v, g, beta, state)
    tokens, key_heads, key = q.shape
    heads, value = v.shape[1:]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensor.dtype == v.dtype, f"{name} is {tensor.dtype}, v is {v.dtype}"
        assert tensor.stride(2) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
        assert tensor.stride(0) * chunks.size < 2**31, f"{name} strides {tensor.stride()}: rows too far apart"
    assert state.stride()[1:] == (key * value, value, 1), state.stride()
    out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    num_chunks = chunks.seq.shape[0]
    if num_chunks == 0:
        return out
    tiles = _Tiles.choose(v.dtype, chunks.size, key, value)
    parts = triton.cdiv(chunks.size, tiles.tokens)
    pieces = num_chunks * parts * heads
    sums = torch.empty(g.shape, dtype=torch.float32, device=v.device)
    tails = torch.empty_like(sums)
    entering_q = torch.empty((tokens, heads, key), dtype=v.dtype, device=v.device)
    solved_k, leaving_k = torch.empty_like(entering_q), torch.empty_like(entering_q)
    solved_v = torch.empty_like(out)
    totals = torch.empty((pieces, key), dtype=torch.float32, device=v.device)
    system = torch.empty((tokens, heads, tiles.tokens), dtype=torch.float32, device=v.device)
    weights = torch.empty((tokens, heads, tiles.tokens), dtype=v.dtype, device=v.device)
    rows = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    states = plain_states(state, state_scale, slots, has_state, rounding)
    with torch.cuda.device_of(v):
        prepare_kernel[(pieces,)](
            q, k, g, beta, sums, tails, entering_q, solved_k, leaving_k, totals, chunks.start, chunks.length,
            float(scale), NORM_EPS, *rows, g.stride(0), g.stride(1), g.stride(2),
            beta.stride(0), beta.stride(1),
            H=heads, K=key, HEADS_A_KEY=heads // key_heads, NORM=qk_l2norm,
            PARTS=parts, BT=tiles.tokens, BK=tiles.key, num_warps=4,
        )  # fmt: skip
        scores_kernel[(pieces * (tiles.tokens // BLOCK),)](
            q, k, beta, sums, tails, weights, system, chunks.start, chunks.length, float(scale), NORM_EPS,
            *rows, beta.stride(0), beta.stride(1),
            H=heads, K=key, HEADS_A_KEY=heads // key_heads, NORM=qk_l2norm,
            PRECISION=tiles.precision, PARTS=parts, BT=tiles.tokens, BR=BLOCK, BK=tiles.key,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        columns = triton.cdiv(key, tiles.solve) + triton.cdiv(value, tiles.solve)
        solve_kernel[(pieces * columns,)](
            v, beta, system, solved_k, solved_v, chunks.start, chunks.length, v.stride(0), v.stride(1),
            beta.stride(0), beta.stride(1),
            H=heads, K=key, V=value, PRECISION=tiles.solve_precision, PARTS=parts, BT=tiles.tokens, BR=BLOCK,
            BC=tiles.solve, num_warps=4, num_stages=1,
        )  # fmt: skip
        _scan_kernel[(slots.shape[0] * heads * triton.cdiv(value, tiles.scan),)](
            entering_q, solved_k, leaving_k, solved_v, weights, totals, states.rows, out, cu_seqlens,
            states.slots, has_state, chunks.cu_chunks, states.rows.stride(0),
            H=heads, K=key, V=value, Q=chunks.size, PRECISION=tiles.precision, BT=tiles.tokens, BK=tiles.key,
            BV=tiles.scan, num_warps=4, num_stages=tiles.stages,
        )  # fmt: skip
    states.commit(cu_seqlens)
    return out
