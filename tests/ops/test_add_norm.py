"""The seam between blocks against its float64 definition."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from inputs import check, fused

from recurra.ops.add_norm import reference


@pytest.mark.parametrize("width", [1, 37, 96, 1000, 2049])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32-stream", "narrow-stream"])
def test_add_rms_norm(backend: Backend, act_dtype: torch.dtype, width: int, narrow: bool) -> None:
    op = backend.op("add_rms_norm")
    x = (torch.randn(5, width) * 3).to(act_dtype)
    residual = torch.randn(5, width).to(act_dtype if narrow else torch.float32)
    weight = torch.rand(width).to(act_dtype)
    (view,) = fused(x.to(backend.device))
    before = residual.clone()
    got = op(view, residual.to(backend.device), weight.to(backend.device), 1e-5)
    plain = reference.add_rms_norm(x, residual, weight, 1e-5)
    exact = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    assert got[0].dtype == x.dtype
    assert got[1].dtype == residual.dtype
    for name, *values in zip(("norm", "residual"), got, plain, exact, strict=True):
        check(*values, name)
    assert torch.equal(residual, before), "the old stream is left as it was"


def test_no_rows(backend: Backend) -> None:
    none = torch.zeros(0, 8, device=backend.device)
    out, added = backend.op("add_rms_norm")(none, none, torch.ones(8, device=backend.device), 1e-5)
    assert out.shape == added.shape == (0, 8)
