"""On GPUs: one kernel, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.triton_dependent import await_before, launch_options, release


@triton.jit
def _add_norm_kernel(
    x,
    residual,
    weight,
    out,
    added,
    x_row,
    eps,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BW)
    ok = i < WIDTH
    release(DEPENDENT)
    w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    await_before(DEPENDENT)
    v = tl.load(residual + row * WIDTH + i, mask=ok, other=0.0).to(tl.float32)
    v += tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    rounded = v.to(added.dtype.element_ty)
    tl.store(added + row * WIDTH + i, rounded, mask=ok)
    v = rounded.to(tl.float32)
    mean = tl.sum(v * v, axis=0) / WIDTH
    y = v * (1.0 / tl.sqrt_rn(mean + eps)) * w
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=ok)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :class:`recurra.ops.add_norm.AddRMSNorm`."""
    rows, width = residual.shape
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.stride(1) == 1, f"strides {x.stride()}: unit column stride needed"
    assert residual.is_contiguous(), residual.stride()
    assert weight.is_contiguous(), weight.stride()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    added = torch.empty_like(residual)
    if rows == 0:
        return out, added
    columns = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(rows,)](
            x, residual, weight, out, added, x.stride(0), eps, WIDTH=width, BW=columns,
            num_warps=min(16, max(1, columns // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out, added
