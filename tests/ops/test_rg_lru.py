"""The real-gated linear recurrent unit: every backend against its float64 definition, and that against a sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_inputs import PackedCase, run_packed, run_step
from backends import Backend
from inputs import EXACT, Op, Precision, check, poisoned_pool
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.cache.spec import rg_lru_state
from recurra.ops.rg_lru import reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
REFERENCE = reference.rg_lru_varlen
LENGTHS = (1, 0, 63, 64, 65, 16, 1, 3, 130)
STATES = (True, True, False, True, True, False, False, True, False)


@dataclass(frozen=True)
class RGLRUCase(PackedCase):
    """Decays of an open gate from 0.9 to 0.999, as the models are initialised, and some that forget at once."""

    x: Tensor  # (T, channels)
    input_gate: Tensor
    recurrent_gate: Tensor
    log_decay: Tensor  # (channels,)
    state: Tensor  # (S, H, P)
    ACT = ("x", "input_gate", "recurrent_gate")
    TOKENS = ("x", "input_gate", "recurrent_gate")

    @classmethod
    def draw(cls, tokens: int, rows: int, blocks: int, width: int) -> RGLRUCase:
        torch.manual_seed(tokens + blocks * width)
        channels = blocks * width
        made = [torch.randn(tokens, channels, dtype=torch.float64) for _ in range(3)]
        log_decay = -torch.logspace(-3.5, 1.0, channels, dtype=torch.float64)
        return cls(
            made[0], made[1], 3 * made[2], log_decay, torch.randn(rows, blocks, width, dtype=torch.float64)
        )

    def pool(self, precision: Precision, rows: int) -> StatePool:
        spec = rg_lru_state(*self.state.shape[1:], 4, torch.float32, precision.state)
        return poisoned_pool(spec, rows, self.x.device, precision.rounding(self.x.device))

    @property
    def _inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.input_gate, self.recurrent_gate, self.log_decay

    def call(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(*self._inputs, state, *where)

    def update(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(state, *self._inputs, *where)


def _draw(lengths: tuple[int, ...] = LENGTHS, blocks: int = 2, width: int = 20) -> RGLRUCase:
    return RGLRUCase.draw(sum(lengths), len(lengths), blocks, width)


def _judge(
    backend: Backend,
    case: RGLRUCase,
    precision: Precision = FP32,
    lengths: tuple[int, ...] = LENGTHS,
    states: tuple[bool, ...] = STATES,
) -> None:
    op = backend.op("rg_lru_varlen")
    got = run_packed(op, case, precision, lengths, states, backend.device, chunk=64)
    plain = run_packed(REFERENCE, case, precision, lengths, states, CPU)
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, lengths, states, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("known", [True, False])
def test_definition_is_the_sum_over_the_past(known: bool) -> None:
    """h_t = sum over s of (product of a after s) * what s adds, with the unscaled first token."""
    case = _draw((9,))
    y, state = run_packed(REFERENCE, case, EXACT, (9,), (known,), CPU)
    log_a = case.log_decay / (1 + torch.exp(-case.recurrent_gate))
    added = case.x / (1 + torch.exp(-case.input_gate)) * (1 - torch.exp(2 * log_a)).sqrt()
    carried = case.state[0].flatten()
    if not known:
        added[0] = case.x[0] / (1 + torch.exp(-case.input_gate[0]))
        carried = torch.zeros_like(carried)
    total = log_a.cumsum(0)
    for t in range(9):
        want = total[t].exp() * carried
        for s in range(t + 1):
            want = want + (total[t] - total[s]).exp() * added[s]
        torch.testing.assert_close(y[t], want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state[0].flatten(), y[-1], rtol=0, atol=0)


@pytest.mark.parametrize(("blocks", "width"), [(1, 1), (4, 16), (3, 33), (2, 64)])
def test_shapes(backend: Backend, blocks: int, width: int) -> None:
    lengths, states = (1, 17, 70), (True, False, True)
    _judge(backend, _draw(lengths, blocks, width), FP32, lengths, states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and torch.bfloat16 in (act_dtype, state_dtype):
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    _judge(backend, _draw(), Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("state_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_8_bit_states(backend: Backend, state_dtype: torch.dtype) -> None:
    """Read and written with their scales; within the error of the format, which the reference has too."""
    lengths, states = (5, 1, 40), (True, False, True)
    case, precision = _draw(lengths), Precision(torch.float32, state_dtype)
    got = run_packed(backend.op("rg_lru_varlen"), case, precision, lengths, states, backend.device)
    want = run_packed(REFERENCE, case, precision, lengths, states, CPU)
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1].cpu(), want[1], rtol=0.13, atol=0.02)


@pytest.mark.parametrize("cuts", [(1,), (64,), (63, 65), (3, 4, 129)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, cuts: tuple[int, ...]) -> None:
    op, case, parts = backend.op("rg_lru_varlen"), _draw((130,)), []
    state = case.to(FP32, backend.device).state
    for begin, end in pairwise((0, *cuts, 130)):
        part = case.tokens(slice(begin, end), state=state)
        y, state = run_packed(op, part, FP32, (end - begin,), (begin > 0,), backend.device)
        parts.append(y)
    plain = run_packed(REFERENCE, case, FP32, (130,), (False,), CPU)
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (130,), (False,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_token_by_token_equals_whole(backend: Backend) -> None:
    case, parts = _draw((9,)), []
    state = case.to(FP32, backend.device).state
    for t in range(9):
        y, state = run_step(
            backend.op("rg_lru_update"), case.tokens(slice(t, t + 1), state=state), FP32, backend.device
        )
        parts.append(y)
    plain = run_packed(REFERENCE, case, FP32, (9,), (True,), CPU)
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (9,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_update_with_padding(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    precision, case = Precision(act_dtype, state_dtype), _draw((1,) * 5, 3, 50)
    got = run_step(backend.op("rg_lru_update"), case, precision, backend.device, padding=3)
    plain = run_step(reference.rg_lru_update, case, precision, CPU)
    exact = run_step(reference.rg_lru_update, case.rounded(precision), EXACT, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def test_packed_equals_alone_in_any_slot(backend: Backend) -> None:
    """Bit for bit: a sequence's arithmetic depends neither on its neighbours nor on its slot."""
    op, lengths, states = backend.op("rg_lru_varlen"), (5, 3, 137), (True, False, True)
    case = _draw(lengths)
    packed, finals = run_packed(op, case, FP32, lengths, states, backend.device)
    order = torch.tensor([2, 4, 1], dtype=torch.int32, device=backend.device)
    elsewhere = run_packed(op, case, FP32, lengths, states, backend.device, slots=order)
    assert torch.equal(packed, elsewhere[0])
    assert torch.equal(finals, elsewhere[1])
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 145))):
        alone = case.tokens(slice(begin, end), state=case.state[s : s + 1])
        y, state = run_packed(op, alone, FP32, (end - begin,), (s != 1,), backend.device)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(state[0], finals[s])


def test_gates_shut_and_wide_open(backend: Backend) -> None:
    """A shut recurrent gate keeps the state and takes nothing; an open one of a strong decay forgets all."""
    case = _draw((4,), 1, 8)
    shut = replace(case, recurrent_gate=torch.full_like(case.recurrent_gate, -200.0))
    y, state = run_packed(backend.op("rg_lru_varlen"), shut, FP32, (4,), (True,), backend.device)
    torch.testing.assert_close(y.cpu(), case.state[0].float().expand(4, 8), rtol=0, atol=0)
    opened = replace(
        case,
        recurrent_gate=torch.full_like(case.recurrent_gate, 200.0),
        input_gate=torch.full_like(case.input_gate, 200.0),
        log_decay=torch.full_like(case.log_decay, -80.0),
    )
    y, state = run_packed(backend.op("rg_lru_varlen"), opened, FP32, (4,), (True,), backend.device)
    torch.testing.assert_close(y.cpu(), case.x.float(), rtol=1e-6, atol=1e-6)
    assert state.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_real_sizes(act: torch.dtype) -> None:
    """RecurrentGemma-9B's channels, prompts beyond many tiles, twice the same bits."""
    lengths, states = (2100, 1, 777), (False, True, True)
    gpu, case = torch.device("cuda"), RGLRUCase.draw(sum(lengths), 3, 16, 256)
    op, precision = Backend("triton", gpu).op("rg_lru_varlen"), Precision(act, torch.float32)
    got = run_packed(op, case, precision, lengths, states, gpu)
    again = run_packed(op, case, precision, lengths, states, gpu)
    assert torch.equal(got[0], again[0]), "an answer that changes from run to run is a race"
    plain = run_packed(REFERENCE, case, precision, lengths, states, gpu)
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, lengths, states, gpu)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")
