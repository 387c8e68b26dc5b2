"""Replay: the plain update's outputs at every phase of the ring, and its states where the ring is folded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from inputs import EXACT, Precision, SSDCase, error, fused
from torch import Tensor

from recurra.ops.replay import reference
from recurra.ops.rounding import SCALE_DTYPE, SCALED
from recurra.ops.rounding.reference import load
from recurra.ops.rounding.reference import store as store_rounded
from recurra.ops.ssm import reference as ssm
from recurra.ring import Ring
from recurra.rounding import NEAREST, Rounding

SINGLE = Precision(torch.float32, torch.float32)
SIZES = {"usual": (4, 8, 2, 16), "odd": (6, 5, 3, 12), "one_group": (3, 9, 1, 7), "long": (1, 3, 1, 80)}
SMALL = (2, 9, 1, 6)
PRECISIONS = (
    SINGLE,
    Precision(torch.bfloat16, torch.float32),
    Precision(torch.bfloat16, torch.float16, by_chance=True),
    Precision(torch.bfloat16, torch.bfloat16),
    Precision(torch.float32, torch.float8_e4m3fn),
    Precision(torch.bfloat16, torch.int8, by_chance=True),
)


def check(got: Tensor, plain: Tensor, exact: Tensor, what: str) -> None:
    """Within three times the plain update's error in float32, or a few roundings: the sums are other sums."""
    seen, allowed = error(got.float().cpu(), exact), 3 * error(plain, exact) + 3e-7
    assert seen <= allowed, f"{what}: error {seen:.3e}, allowed {allowed:.3e}"


def _ints(values: Any, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Memory:
    """Checkpoints and rings by slot, poisoned where nothing was written."""

    def __init__(
        self, case: SSDCase, precision: Precision, slots: list[int], device: torch.device | str, places: int
    ):
        rows, heads, dim, size = case.state.shape
        groups, total = case.B.shape[1], max(slots) + 2
        poison = {"device": device, "dtype": precision.act}
        self.ring = Ring(
            torch.full((total, places, heads, dim), float("nan"), **poison),
            torch.full((total, places, heads), float("nan"), device=device, dtype=case.A.dtype),
            torch.full((total, places, groups, size), float("nan"), **poison),
            torch.full((total, groups, 2), -(2**30), dtype=torch.int32, device=device),
        )
        shape = (total, heads, dim, size)
        filler = 77 if precision.state == torch.int8 else float("nan")
        self.state = torch.full(shape, filler, dtype=torch.float32, device=device).to(precision.state)
        scales = shape[:-1] if precision.state in SCALED else (total, 0)
        self.scale = torch.full(scales, float("nan"), dtype=SCALE_DTYPE, device=device)
        self.rounding: Rounding = precision.rounding(device)
        self.slots = _ints(slots, device)
        store_rounded(self.state, self.scale, self.slots, case.state.to(device), NEAREST)
        for slot in slots:
            self.ring.at[slot] = 0
        del rows

    def step(self, op: Any, case: SSDCase, rows: slice | Tensor, slots: Tensor, **more: Any) -> Tensor:
        """One step of the case's tokens ``rows``; z, B, C and x as the fused projection gives them."""
        x, B, C = fused(case.x[rows].flatten(1), case.B[rows].flatten(1), case.C[rows].flatten(1))
        z = None if case.z is None else case.z[rows]
        y: Tensor = op(
            self.state, self.ring, x.unflatten(1, case.x.shape[1:]), case.dt[rows], case.A,
            B.unflatten(1, case.B.shape[1:]), C.unflatten(1, case.C.shape[1:]), case.D, z, case.dt_bias, slots,
            dt_limit=case.dt_limit, state_scale=self.scale, rounding=self.rounding, **more,
        )  # fmt: skip
        return y

    def fold(self, op: Any, case: SSDCase, slots: Tensor | None = None) -> Tensor:
        """Fold the slots' rings, and the states that result, widened."""
        where = self.slots if slots is None else slots
        has = torch.ones(where.shape[0], dtype=torch.bool, device=where.device)
        op(self.state, self.ring, case.A, where, has, state_scale=self.scale, rounding=self.rounding)
        return load(self.state, self.scale, where, torch.float32)


def _plain(case: SSDCase, tokens: int, rows: int) -> tuple[list[Tensor], Tensor]:
    """Outputs of ``tokens`` plain updates of ``rows`` sequences, token after token, and the last states."""
    state, slots = torch.cat([case.state[:1], case.state]), torch.arange(1, rows + 1, dtype=torch.int32)
    outs = []
    for t in range(tokens):
        at = slice(t * rows, (t + 1) * rows)
        z = None if case.z is None else case.z[at]
        outs.append(
            ssm.selective_state_update(
                state, case.x[at], case.dt[at], case.A, case.B[at], case.C[at], case.D, z, case.dt_bias, slots,
                dt_limit=case.dt_limit,
            )
        )  # fmt: skip
    return outs, state[1:]


def _draw(size: str, tokens: int, rows: int, **more: Any) -> SSDCase:
    return SSDCase.draw(tokens * rows, rows, *SIZES[size], **more)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 2, 16])
def test_every_phase_is_the_plain_update(backend: Backend, size: str, length: int) -> None:
    update, fold = backend.op("replay_state_update"), backend.op("replay_fold")
    if backend.interpreted and length == 16 and size != "long":
        pytest.skip("slow; the other lengths and -m gpu cover it")
    tokens, rows = 2 * length + 2, 2
    drawn = _draw(size, tokens, rows, optional=size != "one_group", wide_skip=size == "odd")
    case, slots = drawn.to(SINGLE, backend.device), [3, 1]
    memory = Memory(case, SINGLE, slots, backend.device, length + 1)
    exact, exact_state = _plain(drawn.rounded(SINGLE), tokens, rows)
    plain, plain_state = _plain(drawn.to(SINGLE), tokens, rows)
    for t in range(tokens):
        y = memory.step(update, case, slice(t * rows, (t + 1) * rows), memory.slots)
        check(y, plain[t], exact[t], f"output {t}")
        assert int(memory.ring.at[3, 0, 1]) == t % length + 1
    check(memory.fold(fold, case), plain_state, exact_state, "state")
    assert not memory.ring.at[memory.slots.long()].any()


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_formats(backend: Backend, precision: Precision) -> None:
    """Checkpoints are rounded once a fold, and the same bits are stored whoever computes the same numbers."""
    if precision.act not in backend.dtypes:
        pytest.skip(f"{backend.name} computes in float32")
    if backend.interpreted and precision.state == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding it")
    length, tokens, rows = 2, 5, 2
    drawn = SSDCase.draw(tokens * rows, rows, *SMALL)
    answers = []
    for update, fold, device in (
        (backend.op("replay_state_update"), backend.op("replay_fold"), backend.device),
        (reference.replay_state_update, reference.replay_fold, torch.device("cpu")),
    ):
        case = drawn.to(precision, device)
        memory = Memory(case, precision, [2, 1], device, length + 1)
        outs = []
        for t in range(tokens):
            outs.append(
                memory.step(update, case, slice(t * rows, (t + 1) * rows), memory.slots).float().cpu()
            )
            memory.rounding.advance()
        answers.append((torch.stack(outs), memory.fold(fold, case).cpu()))
    (y, state), (same_y, same_state) = answers
    bits = {torch.float8_e4m3fn: 0.13, torch.int8: 0.03, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    slack = bits.get(precision.state, 1e-5) * same_state.abs().max()
    assert (state - same_state).abs().max() <= slack
    # A number between two that can be stored may go either way on the last bit of float32; few do.
    assert (state != same_state).float().mean() < 0.02 or precision.state == torch.float32
    torch.testing.assert_close(y, same_y, rtol=2e-2, atol=2e-2 * float(same_y.abs().max()))


def test_mixed_phases_and_padding(backend: Backend) -> None:
    """Rows join at different times; a batch is what each is alone; slot 0 and strangers stay as they are."""
    update, length, tokens, rows = backend.op("replay_state_update"), 2, 6, 3
    drawn = SSDCase.draw(tokens * rows, rows, *SMALL)
    case, device = drawn.to(SINGLE, backend.device), backend.device
    memory = Memory(case, SINGLE, [2, 1, 4], device, length + 1)
    alone = Memory(case, SINGLE, [2, 1, 4], device, length + 1)
    before = [t[[0, 3]].clone() for t in (*memory.ring, memory.state)]
    for t in range(tokens):
        here = [r for r in range(rows) if t >= 2 * r]
        at = torch.tensor([t * rows + r for r in [*here, 0]], device=device)
        slots = torch.cat([memory.slots[here], _ints([0], device)])
        y = memory.step(update, case, at, slots)
        assert not y[-1].any()
        for i, r in enumerate(here):
            row = slice(t * rows + r, t * rows + r + 1)
            one = alone.step(update, case, row, alone.slots[r : r + 1])[0]
            torch.testing.assert_close(one, y[i], rtol=1e-5, atol=1e-5)
    after = [t[[0, 3]] for t in (*memory.ring, memory.state)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.isnan(), new.isnan())
        assert torch.equal(old.nan_to_num(), new.nan_to_num())


def test_several_tokens_with_guesses_taken_back(backend: Backend) -> None:
    """Windows of up to three tokens, some refused: the accepted tokens' outputs are a plain run's."""
    update, fold = backend.op("replay_state_update"), backend.op("replay_fold")
    length, window, device = 5, 3, backend.device
    drawn = _draw("usual", 24, 1)
    case = drawn.to(SINGLE, device)
    memory = Memory(case, SINGLE, [1], device, length + window)
    slots = _ints([1, 0], device)
    accepted, rejected, outs, chosen = 0, 0, [], list[int]()
    for step, (count, keep) in enumerate(
        [(3, 1), (2, 2), (3, 3), (1, 1), (3, 2), (3, 1), (2, 1), (3, 3), (0, 0)]
    ):
        # Guesses that will be refused are other tokens than those that take their place.
        at = [accepted + j if j < keep else 20 + j for j in range(count)]
        y = memory.step(
            update, case, torch.tensor([*at, 0], dtype=torch.long, device=device), slots,
            cu_seqlens=_ints([0, count, count + 1], device), window=window,
            rejected=_ints([rejected, 0], device) if step else None,
        )  # fmt: skip
        assert not y[count:].any()
        outs.extend(y[:keep].cpu())
        chosen += at[:keep]
        accepted, rejected = accepted + keep, count - keep
    exact, exact_state = _plain(drawn.rounded(SINGLE), accepted, 1)
    plain, plain_state = _plain(drawn.to(SINGLE), accepted, 1)
    check(torch.stack(outs), torch.cat(plain), torch.cat(exact), "outputs")
    check(memory.fold(fold, case, slots[:1]), plain_state, exact_state, "state")


def test_a_new_sequence_reads_nothing(backend: Backend) -> None:
    fold, device = backend.op("replay_fold"), backend.device
    case = _draw("usual", 1, 2).to(SINGLE, device)
    memory = Memory(case, SINGLE, [1, 2], device, 4)
    memory.ring.at[1] = 2**30  # somebody else's leavings
    memory.ring.at[2] = 0
    before = memory.state.clone()
    has = torch.tensor([False, True, False], device=device)
    fold(memory.state, memory.ring, case.A, _ints([1, 2, 0], device), has)
    assert not memory.ring.at[1:3].any()
    assert (memory.ring.at[0] == -(2**30)).all()
    assert torch.equal(before.nan_to_num(), memory.state.nan_to_num())


def test_a_copied_row_goes_on_alike(backend: Backend) -> None:
    """Forks and saved rows in mid-ring are copies of everything that a slot holds."""
    update, device = backend.op("replay_state_update"), backend.device
    case = _draw("usual", 10, 1).to(SINGLE, device)
    memory = Memory(case, SINGLE, [1, 2], device, 5)
    for t in range(6):
        memory.step(update, case, slice(t, t + 1), memory.slots[:1])
    for tensor in (*memory.ring, memory.state):
        tensor[2] = tensor[1]
    for t in range(6, 10):
        at = torch.tensor([t, t], device=device)
        one, other = memory.step(update, case, at, memory.slots)
        assert torch.equal(one, other)


def test_definition_is_the_plain_update() -> None:
    """Float64: the formula is the recurrence, to the last digits."""
    drawn = _draw("odd", 11, 2).to(EXACT)
    memory = Memory(drawn, EXACT, [1, 2], "cpu", 5)
    exact, exact_state = _plain(drawn, 11, 2)
    for t in range(11):
        y = memory.step(reference.replay_state_update, drawn, slice(2 * t, 2 * t + 2), memory.slots)
        torch.testing.assert_close(y, exact[t], rtol=1e-11, atol=1e-11)
    state = memory.fold(reference.replay_fold, drawn)
    torch.testing.assert_close(state, exact_state.float(), rtol=1e-6, atol=1e-6)
