"""One step of the recurrence: every backend against its float64 definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from inputs import EXACT, Precision, ScanCase, SSDCase, check, run_update, tokens_of

from recurra.ops.ssm import reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
PLAIN = reference.selective_state_update


def _judge(backend: Backend, case: ScanCase | SSDCase, precision: Precision, padding: int = 2) -> None:
    op = backend.op("selective_state_update")
    got = run_update(op, case, precision, backend.device, padding=padding)
    plain = run_update(PLAIN, case, precision, CPU)
    exact = run_update(PLAIN, case.rounded(precision), EXACT, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize(
    ("heads", "dim", "groups", "state_size"),
    [(4, 16, 1, 16), (4, 48, 2, 80), (3, 80, 3, 96), (2, 112, 1, 48), (2, 64, 2, 128), (1, 5, 1, 3)],
)
def test_mamba2_shapes(backend: Backend, heads: int, dim: int, groups: int, state_size: int) -> None:
    _judge(backend, SSDCase.draw(3, 3, heads, dim, groups, state_size), FP32)


@pytest.mark.parametrize(("channels", "state_size"), [(40, 16), (300, 16), (130, 12), (33, 7), (5, 64)])
def test_mamba1_shapes(backend: Backend, channels: int, state_size: int) -> None:
    _judge(backend, ScanCase.draw(3, 3, channels, state_size), FP32)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [1, 2])
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype, family: int) -> None:
    case = ScanCase.draw(4, 4, 40, 16) if family == 1 else SSDCase.draw(4, 4, 4, 16, 2, 24)
    _judge(backend, case, Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias"])
def test_each_optional_part_absent(backend: Backend, absent: str) -> None:
    for case in (ScanCase.draw(3, 3, 40, 16), SSDCase.draw(3, 3, 4, 16, 2, 24)):
        _judge(backend, replace(case, **{absent: None}), FP32)


def test_all_optional_parts_absent(backend: Backend) -> None:
    _judge(backend, ScanCase.draw(3, 3, 40, 16, optional=False), FP32)
    _judge(backend, SSDCase.draw(3, 3, 4, 16, 2, 24, optional=False), FP32)


def test_a_skip_weight_for_each_channel(backend: Backend) -> None:
    _judge(backend, SSDCase.draw(3, 3, 4, 16, 2, 24, wide_skip=True), FP32)


def test_dt_limit(backend: Backend) -> None:
    case = replace(SSDCase.draw(5, 5, 4, 16, 2, 24), dt_limit=(0.05, 0.1))
    _judge(backend, case, FP32)


def test_tiny_steps_keep_their_digits(backend: Backend) -> None:
    """softplus(-14) is 8e-7: computed as log(1 + exp(x)) in float32 it is off by seven percent."""
    case = SSDCase.draw(6, 6, 4, 16, 2, 24)
    case = replace(case, dt_bias=torch.full_like(case.A, -14.0), state=torch.zeros_like(case.state))
    _judge(backend, replace(case, D=None), FP32)


def test_rows_do_not_see_each_other(backend: Backend) -> None:
    """Eight copies of one row, among others, give one answer, bit for bit."""
    op = backend.op("selective_state_update")
    case = SSDCase.draw(9, 9, 4, 16, 2, 24)
    same = torch.tensor([0, 1, 0, 0, 2, 0, 0, 3, 0])
    case = replace(tokens_of(case, same), state=case.state[same])
    y, state = run_update(op, case, FP32, backend.device)
    copies = same == 0
    assert len(y[copies.to(y.device)].flatten(1).unique(dim=0)) == 1
    assert len(state[copies.to(y.device)].flatten(1).unique(dim=0)) == 1


def test_nothing_but_padding_rows(backend: Backend) -> None:
    """A step may be all padding (a graph's warm-up), or empty."""
    op = backend.op("selective_state_update")
    for case in (SSDCase.draw(0, 0, 4, 16, 2, 24), ScanCase.draw(0, 0, 40, 16)):
        y, _ = run_update(op, case, FP32, backend.device)
        assert y.shape == case.x.shape
