"""The compiled decode step against the composition of the reference operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decode_stacks import States, compose, copy, mamba1_block, mamba2_block, pool, shuffled_linear, stack
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.decode_stack import BlockState, Mamba1Weights, Mamba2Weights, StackWeights
from recurra.ops.decode_stack.cpu import build_decode_stack
from recurra.ops.rounding import NEAREST, SCALE_DTYPE, SCALED, stochastic
from recurra.ops.rounding.reference import load, store

Make = Callable[[torch.dtype], tuple[Callable[[], Mamba1Weights | Mamba2Weights], int]]

CASES: dict[str, Make] = {
    "mamba1": lambda t: (lambda: mamba1_block(48, 80, 16, 5, 4, t, bias=False, falcon=False), 48),
    "mamba1_odd": lambda t: (lambda: mamba1_block(37, 51, 11, 7, 3, t, bias=True, falcon=False), 37),
    "falcon": lambda t: (lambda: mamba1_block(40, 64, 48, 16, 4, t, bias=True, falcon=True), 40),
    "mamba2": lambda t: (lambda: mamba2_block(48, 6, 16, 1, 128, 4, t, bias=False, group=96), 48),
    "mamba2_odd": lambda t: (lambda: mamba2_block(29, 4, 9, 2, 21, 2, t, bias=True, group=18), 29),
    "mamba2_groups": lambda t: (lambda: mamba2_block(24, 8, 4, 8, 16, 5, t, bias=True, group=4), 24),
}


def _stack(case: str, dtype: torch.dtype = torch.float32, blocks: int = 2) -> StackWeights:
    make, hidden = CASES[case](dtype)
    return stack(make, blocks, hidden, dtype)


def _inputs(weights: StackWeights, S: int) -> tuple[Tensor, Tensor, States]:
    slots = (torch.randperm(S + 3)[:S] + 1).to(torch.int32)
    ids = torch.randint(0, weights.embedding.shape[0], (S,))
    return ids, slots, pool(weights, S + 4, slots.tolist())


def _spread(mine: Tensor, truth: Tensor) -> float:
    return float((mine.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("seed", [9, 13])
def test_as_exact_as_the_composition(case: str, dtype: torch.dtype, seed: int) -> None:
    """Outputs of three steps and every used state: at most twice plain PyTorch's float32 error.

    One order of summing can be lucky by a factor of four on stacks this small, so plain PyTorch is asked in
    several, and its worst counts.
    """
    torch.manual_seed(seed)
    weights = _stack(case, dtype, blocks={"mamba1": 3, "mamba2": 1}.get(case, 2))
    ids, slots, states = _inputs(weights, {"mamba1": 33, "mamba2": 8, "falcon": 3}.get(case, 5))
    tokens, used = [ids, ids.flip(0), ids], slots.long()
    exact, plain = copy(states, torch.float64), [copy(states) for _ in range(5)]
    truth = [compose(weights, exact, t, slots, torch.float64) for t in tokens]
    run = build_decode_stack(weights, states, 2)
    mine = [run(t, slots) for t in tokens]
    theirs = [[compose(weights, p, t, slots, torch.float32, shuffled_linear) for t in tokens] for p in plain]
    bound = max(_spread(out, t) for outs in theirs for out, t in zip(outs, truth, strict=True))
    assert max(_spread(out, t) for out, t in zip(mine, truth, strict=True)) <= 2 * bound
    free = [s for s in range(states[0][0].shape[0]) if s not in used.tolist()]
    for layer, pair in enumerate(states):
        for which, state in enumerate(pair):
            true = exact[layer][which][used]
            bound = max(_spread(p[layer][which][used], true) for p in plain)
            assert _spread(state[used], true) <= 2 * bound + 1e-30
            assert state[free].isnan().all()


@pytest.mark.parametrize("case", ["falcon", "mamba2_odd"])
def test_the_state_matters(case: str) -> None:
    """Otherwise the comparisons above would hold for kernels that ignore it."""
    weights = _stack(case)
    ids, slots, states = _inputs(weights, 3)
    other = copy(states)
    for _, ssm in other:
        ssm.mul_(0.5)
    first = build_decode_stack(weights, states, 1)(ids, slots)
    second = build_decode_stack(weights, other, 1)(ids, slots)
    assert float((first - second).norm() / first.norm()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", list(CASES))
def test_a_row_is_the_same_alone_and_on_any_threads(case: str, dtype: torch.dtype) -> None:
    weights = _stack(case, dtype)
    ids, slots, states = _inputs(weights, 8)
    outputs = []
    for threads in (1, 2, 3):
        mine = copy(states)
        outputs.append((build_decode_stack(weights, mine, threads)(ids, slots), mine))
    for out, mine in outputs[1:]:
        assert torch.equal(out, outputs[0][0])
        for a, b in zip(mine, outputs[0][1], strict=True):
            assert all(torch.equal(x[slots.long()], y[slots.long()]) for x, y in zip(a, b, strict=True))
    alone = build_decode_stack(weights, copy(states), 2)
    for row in range(8):
        assert torch.equal(alone(ids[row : row + 1], slots[row : row + 1])[0], outputs[0][0][row])


@pytest.mark.parametrize("case", ["mamba1", "falcon", "mamba2_groups"])
@pytest.mark.parametrize("which", [0, 1])
def test_nan_poisons_its_own_row_alone(case: str, which: int) -> None:
    weights = _stack(case)
    ids, slots, states = _inputs(weights, 5)
    clean = build_decode_stack(weights, copy(states), 2)(ids, slots)
    states[0][which][int(slots[2])].flatten()[0] = float("nan")
    out = build_decode_stack(weights, states, 2)(ids, slots)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("case", ["mamba1", "mamba2"])
def test_padding_rows_touch_no_state(case: str) -> None:
    weights = _stack(case)
    ids, slots, states = _inputs(weights, 5)
    slots[1] = slots[4] = 0
    before = copy(states)
    out = build_decode_stack(weights, states, 2)(ids, slots)
    kept = [0, 2, 3]
    expected = build_decode_stack(weights, copy(before), 2)(ids[kept], slots[kept])
    assert torch.equal(out[kept], expected)
    assert out.isfinite().all()
    for old, new in zip(before, states, strict=True):
        for a, b in zip(old, new, strict=True):
            rest = [s for s in range(1, a.shape[0]) if s not in slots.tolist()]
            assert torch.equal(a[rest].nan_to_num(7.0), b[rest].nan_to_num(7.0))


def test_refusals() -> None:
    weights = _stack("mamba1")
    ids, slots, states = _inputs(weights, 2)
    run = build_decode_stack(weights, states, 1)
    with pytest.raises(IndexError, match="token_ids"):
        run(ids + 29, slots)
    with pytest.raises(IndexError, match="slots"):
        run(ids, slots + 9)
    assert run(ids[:0], slots[:0]).shape == (0, 48)
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype"):
        build_decode_stack(weights, tuple((c, s.double()) for c, s in states), 1)
    with pytest.raises(ConfigError, match="mamba_cache_dtype"):
        build_decode_stack(weights, tuple((c.half(), s) for c, s in states), 1)
    mixed = StackWeights(
        weights.embedding, (weights.blocks[0], _stack("mamba2").blocks[0]), weights.final_norm, 1e-5
    )
    with pytest.raises(ConfigError, match="one family"):
        build_decode_stack(mixed, states, 1)


@pytest.mark.parametrize("by_chance", [False, True], ids=("nearest", "stochastic"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("case", ["mamba1_odd", "mamba2_odd"])
def test_narrow_states(case: str, dtype: torch.dtype, by_chance: bool) -> None:
    """One step of one block: outputs as exact as with float32 states, states with the error of their format."""
    weights = _stack(case, blocks=1)
    ids, slots, states = _inputs(weights, 5)
    conv, start = states[0]
    rounding = stochastic(3).of_layer(2) if by_chance else NEAREST
    state, scale = torch.zeros(start.shape).to(dtype), torch.zeros(start.shape[:-1], dtype=SCALE_DTYPE)
    scale.fill_(float("nan"))
    scales = scale if dtype in SCALED else None
    store(state, scales, slots, start[slots.long()], NEAREST)
    held = start.clone()
    held[slots.long()] = load(state, scales, slots, torch.float32)
    exact, plain = copy(((conv, held),), torch.float64), copy(((conv, held),))
    truth = compose(weights, exact, ids, slots, torch.float64)
    theirs = compose(weights, plain, ids, slots, torch.float32)
    mine = build_decode_stack(weights, (BlockState(conv, state, scale, rounding),), 2)(ids, slots)
    assert _spread(mine, truth) <= 2 * max(_spread(theirs, truth), 6e-8)
    after = exact[0][1][slots.long()]
    state_there, scales_there = state.clone(), scale.clone()
    store(state_there, scales_there, slots, after.float(), rounding)
    best = load(state_there, scales_there if dtype in SCALED else None, slots, torch.float64)
    got = load(state, scales, slots, torch.float64)
    assert _spread(got, after) <= 1.1 * _spread(best, after)
    assert (got != best).double().mean() < 0.02, "the same draws: they differ where float32 sums did"


def test_a_stack_draws_afresh_each_step() -> None:
    weights = _stack("mamba2", blocks=2)
    ids, slots, states = _inputs(weights, 3)
    rounding = stochastic(3)

    def after(step: int) -> Tensor:
        rounding.step.fill_(step)
        kept = [
            BlockState(c.clone(), s.half(), None, rounding.of_layer(i)) for i, (c, s) in enumerate(states)
        ]
        run = build_decode_stack(weights, tuple(kept), 1)
        run(ids, slots)
        return torch.stack([k.ssm[slots.long()].view(torch.int16) for k in kept])

    assert torch.equal(after(0), after(0))
    assert not torch.equal(after(0), after(1))
