"""The product on AMX tiles: as exact as float32, and the same for a row in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recurra.ops.cpu.amx import PLANES, amx_ready, split_planes
from recurra.ops.cpu.jit import kernel
from recurra.ops.linear import cpu
from recurra.ops.linear.cpu import linear

needs_tiles = pytest.mark.skipif(not amx_ready(), reason="no AMX tiles on this processor")

#: Rows and columns of a weight: one tile, odd pairs of tiles, rows left over with and without a group of 8.
SHAPES = [(16, 32), (48, 64), (56, 160), (31, 96), (131, 256), (64, 1536)]


def _inputs(batch: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(batch + rows)
    x = torch.randn(batch, columns) * torch.logspace(-6, 6, batch)[:, None]
    return x, torch.randn(rows, columns).bfloat16(), torch.randn(rows)


@kernel
def _split(source: int, target: int) -> None:
    split_planes(source, target, 64)


def test_three_planes_hold_every_bit() -> None:
    torch.manual_seed(0)
    x = torch.cat(
        (torch.randn(26) * 10.0 ** torch.arange(-20, 6), torch.tensor([0.0, -0.0, 3.4e38, -1.0, 1e-30, 7.0]))
    )
    planes = np.zeros((PLANES, 32), dtype=np.uint16)
    _split(x.data_ptr(), planes.ctypes.data)
    parts = torch.from_numpy(planes.view(np.int16)).view(torch.bfloat16).double()
    assert torch.equal(parts.sum(0), x.double())


@needs_tiles
@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_exact_as_float32(shape: tuple[int, int], batch: int) -> None:
    x, weight, bias = _inputs(batch, *shape)
    assert cpu.fits_tiles(weight)
    truth = x.double() @ weight.double().T + bias.double()
    plain = torch.nn.functional.linear(x, weight.float(), bias)
    got = linear(x, weight, bias)
    for row in range(batch):
        bound = (plain[row] - truth[row]).norm() + 1e-7 * truth[row].norm()
        assert (got[row] - truth[row]).norm() <= 2 * bound


@needs_tiles
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_in_any_company(shape: tuple[int, int]) -> None:
    x, weight, bias = _inputs(150, *shape)
    together = linear(x, weight, bias)
    for rows in (slice(0, 1), slice(7, 9), slice(30, 47), slice(100, 101), slice(3, 148)):
        assert torch.equal(linear(x[rows], weight, bias), together[rows])


@needs_tiles
def test_a_row_that_is_not_finite_harms_no_other() -> None:
    x, weight, bias = _inputs(20, 48, 64)
    clean = linear(x, weight, bias)
    x[3, 5], x[17, 0] = float("nan"), float("inf")
    got = linear(x, weight, bias)
    assert not got[[3, 17]].isfinite().any()
    others = [i for i in range(20) if i not in (3, 17)]
    assert torch.equal(got[others], clean[others])


def test_processors_without_tiles_use_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _inputs(5, 48, 64)
    monkeypatch.setattr(cpu, "amx_ready", lambda: False)
    assert not cpu.fits_tiles(weight)
    truth = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(
        linear(x, weight, bias).double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max())
    )


def test_shapes_that_fit_no_tile() -> None:
    for rows, columns in ((15, 64), (64, 48)):
        assert not cpu.fits_tiles(torch.zeros(rows, columns, dtype=torch.bfloat16))
    assert not cpu.fits_tiles(torch.zeros(64, 64))
