"""The matrix product of every backend against float64."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from inputs import check, fused

from recurra.ops.linear import reference


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 96), (3, 37, 5), (17, 128, 130), (40, 96, 64)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_linear(
    backend: Backend, act_dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    op = backend.op("linear")
    x, weight = torch.randn(rows, inputs).to(act_dtype), torch.randn(outputs, inputs).to(act_dtype)
    bias = torch.randn(outputs).to(act_dtype) if biased else None
    (view,) = fused(x.to(backend.device))
    got = op(view, weight.to(backend.device), None if bias is None else bias.to(backend.device))
    exact = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    check(got, reference.linear(x, weight, bias), exact, "output")


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights_under_float32_activations(backend: Backend, weight_dtype: torch.dtype) -> None:
    op = backend.op("linear")
    for rows in (1, 9):
        x, weight = torch.randn(rows, 80), torch.randn(48, 80).to(weight_dtype)
        got = op(x.to(backend.device), weight.to(backend.device))
        check(got, reference.linear(x, weight), reference.linear(x.double(), weight.double()), "output")


def test_no_rows(backend: Backend) -> None:
    op = backend.op("linear")
    got = op(torch.zeros(0, 16, device=backend.device), torch.ones(4, 16, device=backend.device))
    assert got.shape == (0, 4)
