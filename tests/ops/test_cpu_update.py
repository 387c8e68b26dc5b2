"""The CPU's one-token updates: what the shared operator tests leave out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recurra.ops.conv1d import reference as conv_reference
from recurra.ops.conv1d.cpu import causal_conv1d_update
from recurra.ops.ssm import reference
from recurra.ops.ssm.cpu import selective_state_update


@pytest.mark.parametrize("W", [2, 3, 4, 5])
@pytest.mark.parametrize("S", [1, 33])
def test_conv_against_float64(W: int, S: int) -> None:
    channels = 51
    rows = torch.full((S + 3, channels * (W - 1) + 5), float("nan"))
    slots = (torch.randperm(S + 2)[:S] + 1).to(torch.int32)
    rows[slots.long()] = torch.randn(S, rows.shape[1])
    state = rows[:, : channels * (W - 1)].unflatten(1, (channels, W - 1))
    x, weight, bias = (
        torch.randn(S, channels + 4)[:, :channels],
        torch.randn(channels, W),
        torch.randn(channels),
    )
    exact, plain = state.double(), state.clone()
    truth = conv_reference.causal_conv1d_update(x.double(), weight, bias, exact, slots, silu=True)
    near = conv_reference.causal_conv1d_update(x, weight, bias, plain, slots, silu=True)
    got = causal_conv1d_update(x, weight, bias, state, slots, silu=True)
    assert (got - truth).norm() <= 2 * (near - truth).norm()
    assert torch.equal(state.nan_to_num(9.0), plain.nan_to_num(9.0))


def _mamba2(S: int, slots: int) -> tuple[Tensor, dict[str, Tensor]]:
    H, P, G, N = 4, 9, 2, 48
    state = torch.randn(slots, H, P, N)
    return state, {
        "x": torch.randn(S, H, P), "dt": torch.randn(S, H), "A": -torch.rand(H), "B": torch.randn(S, G, N),
        "C": torch.randn(S, G, N), "D": torch.randn(H), "z": torch.randn(S, H, P), "dt_bias": torch.randn(H) - 3,
    }  # fmt: skip


def _mamba1(S: int, slots: int) -> tuple[Tensor, dict[str, Tensor]]:
    channels, N = 300, 21
    state = torch.randn(slots, channels, N)
    return state, {
        "x": torch.randn(S, channels), "dt": torch.randn(S, channels), "A": -torch.rand(channels, N),
        "B": torch.randn(S, N), "C": torch.randn(S, N), "D": torch.randn(channels),
        "z": torch.randn(S, channels), "dt_bias": torch.randn(channels) - 3,
    }  # fmt: skip


@pytest.mark.parametrize("make", [_mamba1, _mamba2])
@pytest.mark.parametrize("S", [1, 33])
def test_state_against_float64(make: object, S: int) -> None:
    state, case = make(S, S + 2)  # type: ignore[operator]
    slots = torch.arange(1, S + 1, dtype=torch.int32)
    state[0] = state[S + 1] = float("nan")
    exact, plain = state.double(), state.clone()
    wide = {name: t.double() for name, t in case.items()}
    truth = reference.selective_state_update(exact, **wide, slots=slots)
    near = reference.selective_state_update(plain, **case, slots=slots)
    got = selective_state_update(state, **case, slots=slots)
    assert (got - truth).norm() <= 2 * (near - truth).norm()
    rows = slots.long()
    assert (state[rows] - exact[rows]).norm() <= 2 * (plain[rows] - exact[rows]).norm()
    assert state[[0, S + 1]].isnan().all()


@pytest.mark.parametrize("make", [_mamba1, _mamba2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_and_poison(make: object, dtype: torch.dtype) -> None:
    state, case = make(5, 6)  # type: ignore[operator]
    state = state.to(dtype)
    slots = torch.tensor([3, 0, 1, 0, 4], dtype=torch.int32)
    state[4, 0, 0] = float("nan")
    before = state.clone()
    out = selective_state_update(state, **case, slots=slots)
    assert out[[1, 3]].eq(0).all()
    assert out[4].isnan().any()
    assert out[[0, 2]].isfinite().all()
    assert torch.equal(state[[2, 5]], before[[2, 5]])
    assert not torch.equal(state[[1, 3]], before[[1, 3]])
