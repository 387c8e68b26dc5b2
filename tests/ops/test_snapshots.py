"""States kept at asked-for positions are those of the prefix alone, and the step's outputs don't change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Backend
from torch import Tensor

from recurra.ops.snapshots import plan, run

LENGTHS, SLOTS, FLAGS = (70, 1, 37), (3, 1, 5), (False, True, True)
KEEP = ([(1, 2), (64, 4)], [(1, 6)], [(5, 1), (20, 3), (37, 5)])
Call = Callable[[Any, Any, Tensor], Tensor]


def _inputs(name: str, device: torch.device) -> tuple[str, tuple[int, ...], Call]:
    """The operator's name, a state's shape, and a call of it."""
    tokens = sum(LENGTHS)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    if name == "conv":
        x, weight = rand(tokens, 9), rand(9, 4)
        return (
            "causal_conv1d_varlen",
            (9, 3),
            lambda op, at, s: op(at[0](x), weight, None, s, *at[1], silu=True),
        )
    if name == "scan":
        x, dt, B, C = rand(tokens, 9), rand(tokens, 9) - 1, rand(tokens, 5), rand(tokens, 5)
        A = -torch.rand(9, 5).to(device)
        return (
            "selective_scan_varlen", (9, 5),
            lambda op, at, s: op(at[0](x), at[0](dt), A, at[0](B), at[0](C), None, None, None, s, *at[1]),
        )  # fmt: skip
    if name == "ssd":
        x, dt, B, C = rand(tokens, 4, 6), rand(tokens, 4) - 1, rand(tokens, 2, 5), rand(tokens, 2, 5)
        A = -torch.rand(4).to(device)
        return (
            "mamba_chunk_scan_varlen", (4, 6, 5),
            lambda op, at, s: op(at[0](x), at[0](dt), A, at[0](B), at[0](C), None, None, s, *at[1]),
        )  # fmt: skip
    q, k, v = rand(tokens, 2, 16), rand(tokens, 2, 16) / 4, rand(tokens, 2, 8)
    if name == "lightning":
        decay = -torch.rand(2).to(device)
        return (
            "lightning_attention_varlen", (2, 16, 8),
            lambda op, at, s: op(at[0](q), at[0](k), at[0](v), decay, s, *at[1]),
        )  # fmt: skip
    g, beta = -torch.rand(tokens, 2).to(device), torch.rand(tokens, 2).to(device)
    return (
        "gated_delta_rule_varlen", (2, 16, 8),
        lambda op, at, s: op(
            at[0](q), at[0](k), at[0](v), at[0](g), at[0](beta), s, *at[1], scale=0.25, qk_l2norm=True
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["conv", "scan", "ssd", "delta", "lightning"])
def test_states_at_positions(backend: Backend, name: str) -> None:
    device = backend.device
    operator, shape, call = _inputs(name, device)
    op = backend.op(operator)
    first = torch.full((6, *shape), float("nan"), device=device)
    first[[1, 5]] = torch.randn(2, *shape).to(device)
    states, kept = first.clone(), torch.full((7, *shape), float("nan"), device=device)
    rounds = plan(LENGTHS, SLOTS, FLAGS, KEEP, 16, device)
    assert [type(r.tokens) for r in rounds] == [torch.Tensor, torch.Tensor, torch.Tensor]
    y = run(lambda *at: call(op, at, states), rounds, sum(LENGTHS), ((states, kept),))

    whole_states = first.clone()
    (whole,) = plan(LENGTHS, SLOTS, FLAGS, ([], [], []), 16, device)
    assert whole.tokens == slice(0, sum(LENGTHS))
    expected = call(op, (whole.pick, whole.where), whole_states)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, whole_states, rtol=1e-4, atol=1e-4, equal_nan=True)

    begin = 0
    for s, wanted in enumerate(KEEP):
        for tokens, row in wanted:
            alone = first.clone()
            (prefix,) = plan([tokens], [SLOTS[s]], [FLAGS[s]], [[]], 16, device)
            call(op, (lambda t, b=begin, n=tokens: t[b : b + n], prefix.where), alone)
            torch.testing.assert_close(kept[row], alone[SLOTS[s]], rtol=1e-4, atol=1e-4)
        begin += LENGTHS[s]
    assert kept[0].isnan().all()


def test_rounds_of_one_sequence_are_slices() -> None:
    rounds = plan([300], [7], [False], [[(128, 3), (256, 4)]], 64, torch.device("cpu"))
    assert [r.tokens for r in rounds] == [slice(0, 128), slice(128, 256), slice(256, 300)]
    assert [r.where[2].tolist() for r in rounds] == [[False], [True], [True]]
    assert [r.rows.tolist() for r in rounds] == [[3], [4], []]


def test_one_byte_states_are_copied() -> None:
    state = torch.randn(3, 4, 5).to(torch.float8_e4m3fn)
    kept = torch.zeros(2, 4, 5).to(torch.float8_e4m3fn)
    rounds = plan([2], [2], [True], [[(2, 1)]], 64, torch.device("cpu"))
    run(lambda pick, where: torch.zeros(2, 1), rounds, 2, ((state, kept),))
    assert torch.equal(kept[1].view(torch.uint8), state[2].view(torch.uint8))


@pytest.mark.parametrize("wanted", [[(0, 1)], [(5, 1)], [(3, 1), (2, 2)]])
def test_impossible_positions(wanted: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError, match="positions"):
        plan([4], [1], [False], [wanted], 64, torch.device("cpu"))
