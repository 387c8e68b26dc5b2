"""Products with 8-bit weights on GPUs.

One row: the weight is read once and widened in registers, so that activations stay as they are. More rows: float8
tiles of the hardware, after one kernel that scales and rounds the rows of x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4  # rows of the weight to a program
_COLUMNS = 1024
_LARGEST, _SMALLEST = 448.0, 2.0**-100


@triton.jit
def _product_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    x_row,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    o_ok = o < OUT
    at = weight + o.to(tl.int64)[:, None] * IN
    acc = tl.zeros((BO, BI), tl.float32)
    for start in tl.static_range(0, IN, BI):
        i = start + tl.arange(0, BI)
        ok = i < IN
        w = tl.load(at + i[None, :], mask=o_ok[:, None] & ok[None, :], other=0.0)
        values = tl.load(x + row * x_row + i, mask=ok, other=0.0)
        acc += w.to(tl.float32) * values.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1) * tl.load(scale + o, mask=o_ok, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out + row * OUT + o, y.to(out.dtype.element_ty), mask=o_ok)


@triton.jit
def _narrow_kernel(x, narrow, scale, x_row, IN: tl.constexpr, BI: tl.constexpr, LARGEST, SMALLEST):
    """A row of x as float8 and its scale."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BI)
    ok = i < IN
    values = tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    by = tl.maximum(tl.max(tl.abs(values), axis=0) / LARGEST, SMALLEST)
    tl.store(narrow + row * IN + i, (values / by).to(narrow.dtype.element_ty), mask=ok)
    tl.store(scale + row, by)


def linear_scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.LinearScaled`; several rows need bfloat16 and sizes of multiples of 16."""
    assert x.stride(1) == 1, f"strides {x.stride()}: unit column stride needed"
    assert weight.is_contiguous(), weight.stride()
    if x.shape[0] <= 1 or weight.dtype == torch.int8:
        return _by_row(x, weight, scale, bias)
    narrow, by_row = narrow_rows(x, weight.dtype)
    product = torch._scaled_mm(
        narrow, weight.t(), scale_a=by_row, scale_b=scale.view(1, -1), out_dtype=torch.bfloat16
    )
    return (product if bias is None else product + bias).to(x.dtype)


def _by_row(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rows, (size, width) = x.shape[0], weight.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    with torch.cuda.device_of(x):
        _product_kernel[(triton.cdiv(size, _BLOCK), rows)](
            x, weight, scale, x if bias is None else bias, out, x.stride(0),
            OUT=size, IN=width, HAS_BIAS=bias is not None, BO=_BLOCK,
            BI=min(_COLUMNS, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
    return out


def narrow_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, in_features) as float8, and float32 scales (rows, 1) that give it back."""
    rows, width = x.shape
    narrow = torch.empty((rows, width), dtype=dtype, device=x.device)
    by_row = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _narrow_kernel[(rows,)](
            x, narrow, by_row, x.stride(0), IN=width, BI=triton.next_power_of_2(width), LARGEST=_LARGEST,
            SMALLEST=_SMALLEST, num_warps=8,
        )  # fmt: skip
    return narrow, by_row
