"""The CPU's own matrix product: odd sizes, stored precisions, and rows that don't see each other."""

from __future__ import annotations

import pytest
import torch

from recurra.errors import ConfigError
from recurra.ops.linear.cpu import linear
from recurra.ops.linear.cpu_many import MANY_ROWS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 16), (37, 51), (67, 100)])
def test_as_exact_as_pytorch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    for rows in (1, 2, 3, 4, 8, 33):
        x = torch.randn(rows, shape[1] + 3)[:, : shape[1]]  # a row stride of its own
        truth = x.double() @ weight.double().T + bias
        got = linear(x, weight, bias)
        plain = x @ weight.float().T + bias
        # One unit in the last place of the largest value: at a few terms plain PyTorch may err by nothing.
        slack = 2**-23 * float(truth.abs().max())
        assert (got - truth).abs().max() <= 2 * (plain - truth).abs().max() + slack


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_and_threads_change_no_bit(dtype: torch.dtype) -> None:
    weight, x = torch.randn(203, 77).to(dtype), torch.randn(MANY_ROWS - 1, 77)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for rows in (1, 2, 5, 33):
        assert torch.equal(linear(x[7 : 7 + rows], weight), results[0][7 : 7 + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [MANY_ROWS, MANY_ROWS + 7])
def test_many_rows_are_as_exact(dtype: torch.dtype, rows: int) -> None:
    """More than a piece of widened weights, a last piece that is short, and a bias."""
    weight, x, bias = torch.randn(1031, 77).to(dtype), torch.randn(rows, 77), torch.randn(1031)
    exact = x.double() @ weight.double().T + bias.double()
    plain = torch.nn.functional.linear(x, weight.float(), bias)
    assert (linear(x, weight, bias) - exact).norm() <= 2 * (plain - exact).norm()


def test_nan_stays_in_its_row() -> None:
    x, weight = torch.randn(5, 20), torch.randn(9, 20)
    x[2, 3] = float("nan")
    out = linear(x, weight)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_empty_and_refused() -> None:
    assert linear(torch.randn(0, 4), torch.randn(3, 4)).shape == (0, 3)
    with pytest.raises(ConfigError, match="int32"):
        linear(torch.randn(1, 4), torch.zeros(3, 4, dtype=torch.int32))
