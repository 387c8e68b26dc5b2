"""exp, softplus and silu of CPU kernels against float64, beside PyTorch's own float32 functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.maths import exp, silu, softplus
from recurra.ops.cpu.tiles import exp2, load_some, store_some
from recurra.ops.cpu.vectors import LANES


@kernel
def _exp_all(x: int, y: int, count: int) -> None:
    for i in range(0, count, LANES):
        store_some(y + 4 * i, exp(load_some(x + 4 * i, count - i)), count - i)


@kernel
def _exp2_all(x: int, y: int, count: int) -> None:
    for i in range(0, count, LANES):
        store_some(y + 4 * i, exp2(load_some(x + 4 * i, count - i)), count - i)


@kernel
def _softplus_all(x: int, y: int, count: int) -> None:
    for i in range(0, count, LANES):
        store_some(y + 4 * i, softplus(load_some(x + 4 * i, count - i)), count - i)


@kernel
def _silu_all(x: int, y: int, count: int) -> None:
    for i in range(0, count, LANES):
        store_some(y + 4 * i, silu(load_some(x + 4 * i, count - i)), count - i)


def _plain_softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=1e9)  # PyTorch's shortcut above 20 would hide the tail


Maths = tuple[Callable[[int, int, int], None], Callable[[Tensor], Tensor]]
FUNCTIONS: dict[str, Maths] = {
    "exp": (_exp_all, torch.exp),
    "exp2": (_exp2_all, torch.exp2),
    "softplus": (_softplus_all, _plain_softplus),
    "silu": (_silu_all, F.silu),
}
RANGES = {
    "exp": [(-1.0, 1.0), (-20.0, 20.0), (-86.9, 88.7)],
    "exp2": [(-1.0, 1.0), (-125.9, 126.9)],
    "softplus": [(-1.0, 1.0), (-16.0, 16.0), (-86.9, -16.0), (16.0, 80.0)],
    "silu": [(-1.0, 1.0), (-20.0, 20.0), (20.0, 1000.0)],
}


def _run(name: str, x: Tensor) -> Tensor:
    y = torch.full_like(x, float("nan"))
    FUNCTIONS[name][0](x.data_ptr(), y.data_ptr(), x.numel())
    return y


def _relative_errors(got: Tensor, truth: Tensor) -> Tensor:
    return ((got.double() - truth) / truth).abs()


@pytest.mark.parametrize(("name", "low", "high"), [(n, *r) for n, ranges in RANGES.items() for r in ranges])
def test_at_most_twice_the_error_of_pytorch(name: str, low: float, high: float) -> None:
    """Root mean square and largest relative error; a float32 rounding alone is 2.5e-8 and 6e-8."""
    x = torch.from_numpy(np.random.default_rng(0).uniform(low, high, 200_003).astype(np.float32))
    x = x[x != 0]
    plain = FUNCTIONS[name][1]
    truth = plain(x.double())
    mine, theirs = _relative_errors(_run(name, x), truth), _relative_errors(plain(x), truth)
    assert mine.square().mean().sqrt() <= 2 * max(float(theirs.square().mean().sqrt()), 2.5e-8)
    assert mine.max() <= 2 * max(float(theirs.max()), 6e-8)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_small_arguments(name: str) -> None:
    """Down to the smallest normal number: exp is 1, softplus log 2, silu half its argument."""
    x = torch.cat([s * 2.0 ** torch.arange(-126.0, -20.0) for s in (1, -1)])
    truth = FUNCTIONS[name][1](x.double())
    kept = truth.abs() > 1.2e-38
    assert _relative_errors(_run(name, x), truth)[kept].max() <= 2.4e-7


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("exp", {0.0: 1.0, 89.0: INF, 3e38: INF, INF: INF, -87.0: 0.0, -3e38: 0.0, -INF: 0.0, NAN: NAN}),
        ("softplus", {89.0: 89.0, 3e38: 3e38, INF: INF, -87.0: 0.0, -3e38: 0.0, -INF: 0.0, NAN: NAN}),
        ("silu", {0.0: 0.0, 89.0: 89.0, 3e38: 3e38, INF: INF, -3e38: 0.0, NAN: NAN}),
        ("exp2", {0.0: 1.0, 1.0: 2.0, -126.0: 2.0**-126, -1e30: 2.0**-126, -INF: 2.0**-126, NAN: NAN}),
    ],
)  # fmt: skip
def test_extremes(name: str, pairs: dict[float, float]) -> None:
    x = torch.tensor(list(pairs))
    expected = torch.tensor(list(pairs.values()))
    assert torch.equal(_run(name, x).nan_to_num(-7.0, posinf=INF), expected.nan_to_num(-7.0, posinf=INF))


def test_exp_just_below_its_limits() -> None:
    """Exact to the last argument before infinity and the last before zero."""
    x = torch.tensor([88.722, 88.7228, -86.97, -86.9799])
    assert _relative_errors(_run("exp", x), torch.exp(x.double())).max() <= 2.4e-7
    assert _run("exp", torch.tensor([88.7229, -86.9801])).tolist() == [INF, 0.0]
