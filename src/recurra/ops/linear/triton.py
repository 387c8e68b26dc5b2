"""Products with few rows on GPUs: the weight is read once, at the speed of memory.

With one row a product is a sum along each row of the weight, and a library's matrix kernels leave a third of the
bandwidth unused. Here a program takes a few rows of the weight and all of their columns, 16 bytes a load, and enough
programs run at once to keep memory busy. More rows go to the library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.linear.torch import linear as library_linear
from recurra.ops.linear.triton_scaled import linear_scaled
from recurra.ops.triton_dependent import await_before, launch_options, release

__all__ = ["linear", "linear_scaled", "row_product"]

#: Most rows of x that a program multiplies with its part of the weight.
MOST_ROWS = 1
#: Rows of the weight to a program: few, so that there are programs enough where the weight has few rows.
_BLOCK = 2


@triton.jit
def _row_kernel(
    x,
    weight,
    bias,
    out,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    i = tl.arange(0, BI)
    o_ok = o < OUT
    at = weight + o.to(tl.int64)[:, None] * IN + i[None, :]
    release(DEPENDENT)
    # The weight's first part is under way before the row that it is multiplied with is there.
    w = tl.load(at, mask=o_ok[:, None] & (i < IN)[None, :], other=0.0)
    await_before(DEPENDENT)
    acc = w.to(tl.float32) * tl.load(x + i, mask=i < IN, other=0.0).to(tl.float32)[None, :]
    for start in tl.static_range(BI, IN, BI):
        ok = start + i < IN
        w = tl.load(at + start, mask=o_ok[:, None] & ok[None, :], other=0.0)
        acc += w.to(tl.float32) * tl.load(x + start + i, mask=ok, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1)
    if HAS_BIAS:
        y += tl.load(bias + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), mask=o_ok)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`."""
    if x.shape[0] > MOST_ROWS or x.shape[0] == 0 or weight.dtype != x.dtype or x.dtype.itemsize != 2:
        return library_linear(x, weight, bias)
    return row_product(x, weight, bias)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row: x (1, in_features), unit column stride."""
    size, width = weight.shape
    assert x.shape == (1, width), (x.shape, weight.shape)
    assert x.stride(1) == 1, f"strides {x.stride()}: unit column stride needed"
    assert weight.is_contiguous(), weight.stride()
    out = torch.empty((1, size), dtype=x.dtype, device=x.device)
    # Two warps do for short rows; longer ones go on in larger steps.
    columns, warps = (512, 2) if width < 4096 else (1024, 4)
    with torch.cuda.device_of(x):
        _row_kernel[(triton.cdiv(size, _BLOCK),)](
            x, weight, x if bias is None else bias, out, OUT=size, IN=width, HAS_BIAS=bias is not None,
            BO=_BLOCK, BI=min(columns, triton.next_power_of_2(width)), num_warps=warps,
            **launch_options(x.device),
        )  # fmt: skip
    return out
