"""Products with 8-bit weights and a scale a row."""

from __future__ import annotations

import pytest
import torch
from backends import Backend

from recurra.ops.linear.cpu_many import MANY_ROWS


def _int8(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    return weight, torch.rand(rows, 1) * 0.1 + 0.01


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 16), (37, 51), (67, 100)])
@pytest.mark.parametrize("biased", [True, False])
def test_int8_as_exact_as_the_plain_product(backend: Backend, shape: tuple[int, int], biased: bool) -> None:
    op = backend.op("linear_scaled")
    if backend.device.type == "cuda":
        pytest.skip("GPUs multiply float8")
    weight, scale = _int8(*shape)
    bias = torch.randn(shape[0]) if biased else None
    for rows in (1, 2) if backend.interpreted else (1, 2, 3, 4, 33, MANY_ROWS + 1):
        x = torch.randn(rows, shape[1] + 3)[:, : shape[1]]
        exact = x.double() @ (weight.double() * scale.double()).T + (0 if bias is None else bias.double())
        plain = x @ (weight.float() * scale).T + (0 if bias is None else bias)
        got = op(x, weight, scale, bias)
        slack = 2**-22 * float(exact.abs().max())
        assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + slack


def test_int8_rows_do_not_see_each_other() -> None:
    from recurra.ops.linear.cpu import linear_scaled

    weight, scale = _int8(203, 77)
    x = torch.randn(MANY_ROWS - 1, 77)
    whole = linear_scaled(x, weight, scale)
    for rows in (1, 2, 5, 33):
        assert torch.equal(linear_scaled(x[7 : 7 + rows], weight, scale), whole[7 : 7 + rows])


def test_no_rows(backend: Backend) -> None:
    if backend.device.type == "cuda":
        pytest.skip("GPUs multiply float8")
    weight, scale = _int8(5, 7)
    assert backend.op("linear_scaled")(torch.zeros(0, 7), weight, scale).shape == (0, 5)


def _float8(shape: tuple[int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.randn(shape, device=device) * shape[1] ** -0.5
    scale = wide.abs().amax(1, keepdim=True) / 448
    return (wide / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("rows", [1, 3, 17, 200])
@pytest.mark.parametrize("shape", [(64, 48), (4112, 4096)])
def test_float8_within_the_format(name: str, rows: int, shape: tuple[int, int]) -> None:
    """The error is that of rounding weights' partners to 3 bits of fraction: some 2.6% of each term's size."""
    op = Backend(name, torch.device("cuda")).op("linear_scaled")
    torch.manual_seed(0)
    weight, scale = _float8(shape, "cuda")
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ (weight.double() * scale.double()).T + bias.double()
    got = op(x, weight, scale, bias)
    assert got.dtype == torch.bfloat16
    rounded = rows > 1 or name == "torch"  # one row is multiplied as it is
    assert (got.double() - exact).norm() <= (0.03 if rounded else 0.004) * exact.norm()
    assert (op(torch.zeros_like(x), weight, scale) == 0).all()


def test_float8_of_one_row_and_rows_made_narrow(backend: Backend) -> None:
    if backend.name != "triton":
        pytest.skip("Triton's own kernels")
    from recurra.ops.linear.triton_scaled import linear_scaled, narrow_rows

    torch.manual_seed(1)
    weight, scale = _float8((35, 70), str(backend.device))
    x = torch.randn(3, 73, device=backend.device)[:, :70]
    exact = x.double() @ (weight.double() * scale.double()).T
    got = torch.cat([linear_scaled(row[None], weight, scale) for row in x])
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    if backend.interpreted:
        return  # the interpreter rounds 125.6 to 64: it loses the carry into the exponent
    narrow, by_row = narrow_rows(x, torch.float8_e4m3fn)
    assert torch.allclose(by_row[:, 0], x.abs().amax(1) / 448)
    # Half a unit of 3 bits, relative, and of the smallest number where x is small.
    error = (narrow.float() * by_row - x).abs()
    assert (error <= x.abs() / 16 * 1.01 + by_row * 2.0**-9).all()
