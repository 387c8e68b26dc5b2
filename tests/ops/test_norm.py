"""The norms of every backend against their float64 definition."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from inputs import check, error, fused
from torch import Tensor

from recurra.ops.norm import reference


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("width", [1, 16, 37, 96, 1000, 2049])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(backend: Backend, act_dtype: torch.dtype, width: int, weighted: bool) -> None:
    op = backend.op("rms_norm")
    x = (torch.randn(5, width) * 3).to(act_dtype)
    weight = torch.rand(width).to(act_dtype) if weighted else None
    (view,) = fused(x.to(backend.device))
    got = op(view, None if weight is None else weight.to(backend.device), 1e-5)
    wide = _double(x, weight)
    check(got, reference.rms_norm(x, weight, 1e-5), reference.rms_norm(*wide, 1e-5), "output")


@pytest.mark.parametrize(("width", "group"), [(96, 96), (96, 32), (96, 24), (2000, 1000), (12, 3)])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_rms_norm_gated(
    backend: Backend, act_dtype: torch.dtype, width: int, group: int, first: bool, gated: bool
) -> None:
    op = backend.op("rms_norm_gated")
    x, z = (torch.randn(5, width).to(act_dtype) for _ in range(2))
    z = z if gated else None
    weight = torch.rand(width).to(act_dtype)
    x_view, *z_view = fused(*(t.to(backend.device) for t in (x, z) if t is not None))
    got = op(
        x_view, z_view[0] if gated else None, weight.to(backend.device), 1e-5, group, norm_before_gate=first
    )
    plain = reference.rms_norm_gated(x, z, weight, 1e-5, group, norm_before_gate=first)
    exact = reference.rms_norm_gated(*_double(x, z, weight), 1e-5, group, norm_before_gate=first)
    check(got, plain, exact, "output")


def test_groups_are_normalised_apart(backend: Backend) -> None:
    """Scaling one group leaves the others' outputs as they are."""
    op = backend.op("rms_norm_gated")
    x = torch.randn(3, 64, device=backend.device)
    weight = torch.ones(64, device=backend.device)
    louder = x.clone()
    louder[:, :16] *= 100
    one, two = (op(t, None, weight, 1e-5, 16) for t in (x, louder))
    assert torch.equal(one[:, 16:], two[:, 16:])
    assert error(op(louder, None, weight, 1e-5, 64), one.cpu()) > 0.1, "one group over all must differ"


def test_definition_has_unit_mean_square() -> None:
    x = torch.randn(4, 50, dtype=torch.float64)
    y = reference.rms_norm(x, None, 0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(y / y[:, :1], x / x[:, :1])


def test_large_and_tiny_rows(backend: Backend) -> None:
    """Rows of 1e4 and 1e-4 in one call; nothing overflows on the way."""
    op = backend.op("rms_norm")
    x = torch.randn(2, 64) * torch.tensor([[1e4], [1e-4]])
    got = op(x.to(backend.device), None, 1e-12)
    check(got, reference.rms_norm(x, None, 1e-12), reference.rms_norm(x.double(), None, 1e-12), "output")
