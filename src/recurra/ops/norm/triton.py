"""The RMS norms on GPUs: one kernel, a program for a few (row, group) pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.triton_dependent import await_before, launch_options, release
from recurra.ops.triton_math import silu


@triton.jit(do_not_specialize=["pairs"])
def _norm_kernel(
    x,
    z,
    weight,
    out,
    pairs,
    x_row,
    z_row,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # columns of a group
    HAS_Z: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    await_before(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    row = pair // GROUPS
    i = tl.arange(0, BW)
    column = (pair % GROUPS)[:, None] * SIZE + i[None, :]
    ok = (pair < pairs)[:, None] & (i < SIZE)[None, :]
    v = tl.load(x + row[:, None] * x_row + column, mask=ok, other=0.0).to(tl.float32)
    gate = 1.0
    if HAS_Z:
        gate = silu(tl.load(z + row[:, None] * z_row + column, mask=ok, other=0.0).to(tl.float32))
        if not NORM_FIRST:
            v *= gate
    mean = tl.sum(v * v, axis=1) / SIZE
    y = v * (1.0 / tl.sqrt_rn(mean + eps))[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    if HAS_Z and NORM_FIRST:
        y *= gate
    tl.store(out + row[:, None] * (GROUPS * SIZE) + column, y.to(out.dtype.element_ty), mask=ok)


def _norm(
    x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, size: int, norm_first: bool
) -> Tensor:
    rows, width = x.shape
    assert width % size == 0, f"group_size={size} does not divide the width {width}"
    assert x.stride(1) == 1, f"strides {x.stride()}: unit column stride needed"
    assert z is None or (z.shape == x.shape and z.stride(1) == 1), "z must look like x"
    assert weight is None or weight.stride(0) == 1, "a dense weight is needed"
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    pairs = rows * (width // size)
    if pairs == 0:
        return out
    columns = triton.next_power_of_2(size)
    together = max(1, 1024 // columns)
    with torch.cuda.device_of(x):
        _norm_kernel[(triton.cdiv(pairs, together),)](
            x, x if z is None else z, x if weight is None else weight, out,
            pairs, x.stride(0), x.stride(0) if z is None else z.stride(0), eps,
            GROUPS=width // size, SIZE=size, HAS_Z=z is not None, HAS_WEIGHT=weight is not None,
            NORM_FIRST=norm_first, BR=together, BW=columns,
            num_warps=min(16, max(1, together * columns // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNorm`."""
    return _norm(x, None, weight, eps, x.shape[1], False)


def rms_norm_gated(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    *,
    norm_before_gate: bool = False,
) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNormGated`."""
    return _norm(x, z, weight, eps, group_size, norm_before_gate)
