"""The experts on GPUs: two grouped products over tokens in the order of their experts.

No number leaves the device: tiles are counted for the worst case, and each finds its expert in a table that was
made there. So the whole can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.moe.activation import activate
from recurra.ops.moe.triton_few import are_few, expert_mlp_few


@triton.jit
def _product_kernel(
    x,
    weight,
    out,
    source,
    tile_expert,
    tile_first,
    tile_end,
    rows,
    x_row,
    weight_expert,
    weight_row,
    COLUMNS: tl.constexpr,
    OUT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """``out[r] = weight[expert of r] x[source[r]]`` for the rows of one tile and BN outputs."""
    tile = tl.program_id(0)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    if first >= end:
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    r = first + tl.arange(0, BM)
    r_ok = r < end
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    n_ok = n < OUT
    at = tl.load(source + r, mask=r_ok, other=0).to(tl.int64)
    matrix = weight + expert * weight_expert
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, COLUMNS, BK):
        k = k0 + tl.arange(0, BK)
        k_ok = k < COLUMNS
        a = tl.load(x + at[:, None] * x_row + k[None, :], mask=r_ok[:, None] & k_ok[None, :], other=0.0)
        b = tl.load(
            matrix + n[None, :].to(tl.int64) * weight_row + k[:, None],
            mask=k_ok[:, None] & n_ok[None, :],
            other=0.0,
        )
        if PRECISE:
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b.to(a.dtype), acc)
    where = out + r.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=r_ok[:, None] & n_ok[None, :])


@dataclass(frozen=True, slots=True)
class _Order:
    """Choices in the order of their experts, and tiles of at most ``size`` rows, none with two experts.

    order: (T k,) int64, which choice is where. expert, first, end: (tiles,) int32; tiles beyond the last are empty.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    size: int


def _arrange(expert_ids: Tensor, num_experts: int) -> _Order:
    flat = expert_ids.flatten()
    choices = flat.shape[0]
    size = 16 if choices <= 16 * num_experts else 64
    tiles = min(choices, -(-choices // size) + num_experts)
    ordered, order = torch.sort(flat, stable=True)
    experts = torch.arange(num_experts + 1, device=flat.device)
    bounds = torch.searchsorted(ordered, experts)  # choices before each expert
    counts = bounds.diff()
    tile_ends = ((counts + size - 1) // size).cumsum(0)
    number = torch.arange(tiles, device=flat.device)
    expert = torch.searchsorted(tile_ends, number, right=True)
    known = expert.clamp(max=num_experts - 1)
    within = number - (tile_ends - (counts + size - 1) // size)[known]
    first = bounds[known] + within * size
    end = torch.minimum(first + size, bounds[known + 1])
    end = torch.where(expert < num_experts, end, first)
    return _Order(order, known.int(), first.int(), end.int(), size)


def _product(x: Tensor, weight: Tensor, source: Tensor, tiles: _Order) -> Tensor:
    """(rows, columns) in the order of tiles, each row by its expert's (out, columns) matrix."""
    _, width, columns = weight.shape
    out = torch.empty(source.shape[0], width, dtype=x.dtype, device=x.device)
    BN, BK = (64, 64) if x.dtype == torch.float32 else (128, 64)
    grid = (tiles.expert.shape[0], triton.cdiv(width, BN))
    with torch.cuda.device_of(x):
        _product_kernel[grid](
            x, weight, out, source, tiles.expert, tiles.first, tiles.end, source.shape[0],
            x.stride(0), weight.stride(0), weight.stride(1),
            COLUMNS=columns, OUT=width, BM=tiles.size, BN=BN, BK=BK, PRECISE=x.dtype == torch.float32,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def expert_mlp(
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
    assert x.stride(1) == 1, f"strides {x.stride()}: unit column stride needed"
    assert w_in.stride(2) == 1, w_in.stride()
    assert w_out.stride(2) == 1, w_out.stride()
    tokens, choices = expert_ids.shape
    if tokens == 0:
        return torch.empty_like(x)
    if are_few(expert_ids, w_in.shape[0]):
        return expert_mlp_few(x, w_in, w_out, expert_ids, expert_weights, activation=activation, gated=gated)
    tiles = _arrange(expert_ids, w_in.shape[0])
    h = activate(_product(x, w_in, tiles.order // choices, tiles), activation, gated)
    rows = torch.arange(tokens * choices, device=x.device)
    y = _product(h, w_out, rows, tiles)
    parts = torch.empty_like(y)
    parts[tiles.order] = y
    weighted = parts.view(tokens, choices, -1).float() * expert_weights.float()[:, :, None]
    return weighted.sum(1).to(x.dtype)
