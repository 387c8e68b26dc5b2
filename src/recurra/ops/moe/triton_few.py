"""The experts on GPUs for a few tokens: every choice reads its own expert, in two kernels and nothing else.

Where hardly an expert is chosen twice there is nothing to gain by bringing tokens into an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Activations as kernels name them, by the names that configurations use.
CODES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3, "relu2": 4}
_ROWS = 8  # weight rows of a program


@triton.jit
def _activate(x, ACT: tl.constexpr):
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-u))
    elif ACT == 3:
        y = tl.maximum(x, 0.0)
    else:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def _in_kernel(
    x,
    weight,
    expert_ids,
    out,
    x_row,
    weight_expert,
    weight_row,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """``out[r] = act(gate) * up`` of choice r for BN of its expert's inner values."""
    choice = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ids + choice)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = n < INNER
    x_at = x + (choice // CHOICES) * x_row
    rows = weight + expert * weight_expert + n[:, None].to(tl.int64) * weight_row
    first = tl.zeros((BN, BK), tl.float32)
    second = tl.zeros((BN, BK), tl.float32)
    for k0 in range(0, COLUMNS, BK):
        k = k0 + tl.arange(0, BK)
        k_ok = k < COLUMNS
        ok = n_ok[:, None] & k_ok[None, :]
        values = tl.load(x_at + k, mask=k_ok, other=0.0).to(tl.float32)[None, :]
        first += tl.load(rows + k[None, :], mask=ok, other=0.0).to(tl.float32) * values
        if GATED:
            ups = tl.load(rows + INNER * weight_row + k[None, :], mask=ok, other=0.0)
            second += ups.to(tl.float32) * values
    h = _activate(tl.sum(first, axis=1), ACT)
    if GATED:
        h *= tl.sum(second, axis=1)
    tl.store(out + choice * INNER + n, h.to(out.dtype.element_ty), mask=n_ok)


@triton.jit
def _out_kernel(
    h,
    weight,
    expert_ids,
    expert_weights,
    out,
    weight_expert,
    weight_row,
    CHOICES: tl.constexpr,
    INNER: tl.constexpr,
    OUT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BN outputs of a token: the sum over its experts, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = n < OUT
    acc = tl.zeros((BN, BK), tl.float32)
    for j in range(CHOICES):
        choice = token * CHOICES + j
        expert = tl.load(expert_ids + choice)
        by = tl.load(expert_weights + choice).to(tl.float32)
        rows = weight + expert * weight_expert + n[:, None].to(tl.int64) * weight_row
        for k0 in range(0, INNER, BK):
            k = k0 + tl.arange(0, BK)
            k_ok = k < INNER
            values = tl.load(h + choice * INNER + k, mask=k_ok, other=0.0).to(tl.float32) * by
            w = tl.load(rows + k[None, :], mask=n_ok[:, None] & k_ok[None, :], other=0.0)
            acc += w.to(tl.float32) * values[None, :]
    tl.store(out + token * OUT + n, tl.sum(acc, axis=1).to(out.dtype.element_ty), mask=n_ok)


def are_few(expert_ids: Tensor, num_experts: int) -> bool:
    """Whether so few choices are made that hardly two are the same."""
    tokens, choices = expert_ids.shape
    return tokens == 1 or tokens * choices <= num_experts // 2


def expert_mlp_few(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    activation: str,
    gated: bool,
) -> Tensor:
    """See :class:`recurra.ops.moe.ExpertMLP`."""
    tokens, choices = expert_ids.shape
    _, width, inner = w_out.shape
    ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
    h = torch.empty(tokens * choices, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _in_kernel[(tokens * choices, triton.cdiv(inner, _ROWS))](
            x, w_in, ids, h, x.stride(0), w_in.stride(0), w_in.stride(1),
            CHOICES=choices, COLUMNS=x.shape[1], INNER=inner, GATED=gated, ACT=CODES[activation],
            BN=_ROWS, BK=_columns(x.shape[1]), num_warps=4,
        )  # fmt: skip
        _out_kernel[(tokens, triton.cdiv(width, _ROWS))](
            h, w_out, ids, weights, out, w_out.stride(0), w_out.stride(1),
            CHOICES=choices, INNER=inner, OUT=width, BN=_ROWS, BK=_columns(inner), num_warps=4,
        )  # fmt: skip
    return out


def _columns(size: int) -> int:
    return min(512, max(16, int(triton.next_power_of_2(size))))
