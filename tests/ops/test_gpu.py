"""What only a real GPU can show: sizes past 32 bits, long prompts, every dtype at real shapes, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from backends import Backend
from inputs import (
    EXACT,
    ConvCase,
    Precision,
    ScanCase,
    SSDCase,
    check,
    chunks_of,
    run_conv,
    run_scan,
    run_update,
)
from plain import ssd_matrix_form

from recurra.ops.conv1d import reference as conv_reference
from recurra.ops.rounding import NEAREST, Rounding, stochastic
from recurra.ops.rounding.reference import store
from recurra.ops.ssm import reference

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TRITON = Backend("triton", GPU)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("act", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "state_size"),
    [(16, 64, 2, 128), (8, 48, 1, 80), (6, 80, 3, 96), (4, 112, 1, 48), (4, 32, 1, 256), (4, 128, 2, 16)],
)
def test_ssd_at_real_shapes(
    act: torch.dtype, chunk: int, heads: int, dim: int, groups: int, state_size: int
) -> None:
    lengths, states = (300, 1, 63, 64, 65, 257), (True, False, True, False, True, False)
    case = SSDCase.draw(sum(lengths), len(lengths), heads, dim, groups, state_size)
    precision = Precision(act, torch.float32)
    op = TRITON.op("mamba_chunk_scan_varlen")
    got = run_scan(op, case, precision, lengths, states, GPU, chunk=chunk)
    again = run_scan(op, case, precision, lengths, states, GPU, chunk=chunk)
    assert torch.equal(got[0], again[0]), "an answer that changes from run to run is a race"
    plain = ssd_matrix_form(case.to(precision, GPU), lengths, states)
    exact = ssd_matrix_form(case.rounded(precision).to(EXACT, GPU), lengths, states)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_a_prompt_of_thirty_thousand_tokens(act: torch.dtype) -> None:
    """Split in two calls it is the same, and its last rows equal the recurrence's own."""
    tokens, cut = 30_011, 14_001
    precision = Precision(act, torch.float32)
    case = SSDCase.draw(tokens, 1, 4, 64, 1, 128).to(precision, GPU)
    op = TRITON.op("mamba_chunk_scan_varlen")
    whole, state = run_scan(op, case, precision, (tokens,), (False,), GPU, chunk=256)
    wide = case.to(Precision(torch.float32, torch.float32), GPU)
    exact, exact_state = run_scan(
        op, wide, Precision(torch.float32, torch.float32), (tokens,), (False,), GPU, chunk=64
    )
    pieces, carried = [], case.state
    for begin, end in ((0, cut), (cut, tokens)):
        rows = slice(begin, end)
        part = SSDCase(
            case.x[rows],
            case.dt[rows],
            case.A,
            case.B[rows],
            case.C[rows],
            case.D,
            None,
            case.dt_bias,
            carried,
        )
        y, carried = run_scan(op, part, precision, (end - begin,), (begin > 0,), GPU, chunk=256)
        pieces.append(y)
    tail = slice(tokens - 600, tokens)
    start = run_scan(op, wide, Precision(torch.float32, torch.float32), (tokens,), (False,), GPU, chunk=128)
    assert torch.isfinite(whole).all()
    plain = exact.to(act)
    check(torch.cat(pieces)[tail], whole[tail], exact[tail].double(), "split")
    if act == torch.float32:
        check(whole, start[0], exact.double(), "whole")
    else:
        # Products in 16 bits: as far from the answer as the matrix form on a stretch it can hold.
        head = slice(0, 2048)
        short = SSDCase(case.x[head], case.dt[head], case.A, case.B[head], case.C[head], case.D, None,
                        case.dt_bias, torch.zeros_like(case.state))  # fmt: skip
        form = ssd_matrix_form(short, (2048,), (False,))
        check(whole[head], form[0], exact[head].double(), "head")
    del plain, state, exact_state


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    """2,100 slots of 128 x 64 x 128: the last slots must hold their own state."""
    slots_total, heads, dim, size = 2100, 128, 64, 128
    pool = torch.zeros(slots_total, heads, dim, size, device=GPU)
    assert pool.numel() > 2**31
    case = SSDCase.draw(2, 2, heads, dim, 8, size).to(Precision(torch.float32, torch.float32), GPU)
    slots = torch.tensor([slots_total - 1, 1], dtype=torch.int32, device=GPU)
    pool[slots.long()] = case.state
    small = case.state.clone()
    near = torch.tensor([0, 1], dtype=torch.int32, device=GPU)
    op = TRITON.op("selective_state_update")
    args = (case.x, case.dt, case.A, case.B, case.C, case.D, case.z, case.dt_bias)
    y = op(pool, *args, slots)
    expected = reference.selective_state_update(small, *args, near)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[slots.long()], small, rtol=1e-5, atol=1e-5)
    assert int(torch.count_nonzero(pool[2 : slots_total - 1])) == 0
    flags = torch.ones(2, dtype=torch.bool, device=GPU)
    before = pool[slots.long()].clone()
    chunks = chunks_of((1, 1), 64, GPU)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32, device=GPU)
    y = TRITON.op("mamba_chunk_scan_varlen")(
        case.x, case.dt, case.A, case.B, case.C, case.D, case.dt_bias, pool, cu, slots, flags, chunks
    )
    expected = reference.selective_state_update(
        before, case.x, case.dt, case.A, case.B, case.C, case.D, None, case.dt_bias, near
    )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[slots.long()], before, rtol=1e-5, atol=1e-5)
    assert int(torch.count_nonzero(pool[2 : slots_total - 1])) == 0


def test_activations_of_more_than_two_to_the_31_elements() -> None:
    """Token times row stride past 32 bits, in the convolution and in the scan's x."""
    tokens, channels = 220_000, 10_240
    assert tokens * channels > 2**31
    x = torch.zeros(tokens, channels, dtype=torch.bfloat16, device=GPU)
    x[-300:].normal_()
    weight = torch.randn(channels, 4, device=GPU).bfloat16()
    state = torch.zeros(2, channels, 3, dtype=torch.bfloat16, device=GPU)
    one = torch.ones(1, dtype=torch.int32, device=GPU)
    new = torch.zeros(1, dtype=torch.bool, device=GPU)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=GPU)
    y = TRITON.op("causal_conv1d_varlen")(
        x, weight, None, state, cu, one, new, chunks_of((tokens,), 256, GPU), silu=True
    )
    short = torch.tensor([0, 400], dtype=torch.int32, device=GPU)
    fresh = torch.zeros_like(state)
    expected = conv_reference.causal_conv1d_varlen(
        x[-400:].float(),
        weight.float(),
        None,
        fresh.float(),
        short,
        one,
        new,
        chunks_of((400,), 256, GPU),
        silu=True,
    )
    check(y[-390:], expected[-390:].bfloat16(), expected[-390:].double(), "last rows")
    assert torch.equal(state[1].T, x[-3:])

    heads, dim = 128, 64
    wide = x[:, : heads * dim].unflatten(1, (heads, dim))
    dt = torch.full((tokens, heads), -1.0, dtype=torch.bfloat16, device=GPU)
    A = -torch.ones(heads, device=GPU)
    BC = torch.randn(tokens, 2, 16, device=GPU).bfloat16()
    pool = torch.zeros(2, heads, dim, 16, device=GPU)
    y = TRITON.op("mamba_chunk_scan_varlen")(
        wide, dt, A, BC[:, :1], BC[:, 1:], None, None, pool, cu, one, new, chunks_of((tokens,), 256, GPU)
    )
    tail = slice(tokens - 400, tokens)
    pool_tail = torch.zeros_like(pool)
    again = TRITON.op("mamba_chunk_scan_varlen")(
        wide[tail], dt[tail], A, BC[tail, :1], BC[tail, 1:], None, None, pool_tail, short, one, new,
        chunks_of((400,), 256, GPU),
    )  # fmt: skip
    difference = (y[-300:].double() - again[-300:].double()).norm() / again[-300:].double().norm()
    assert difference < 2e-2, difference  # other chunk edges: two roundings of a bfloat16 product
    torch.testing.assert_close(pool, pool_tail, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_mamba1_scan_at_a_real_shape(act: torch.dtype) -> None:
    lengths, states = (300, 1, 33), (True, False, True)
    precision = Precision(act, torch.float32)
    case = ScanCase.draw(sum(lengths), 3, 5120, 16)
    got = run_scan(TRITON.op("selective_scan_varlen"), case, precision, lengths, states, GPU)
    plain = run_scan(reference.selective_scan_varlen, case, precision, lengths, states, GPU)
    exact = run_scan(reference.selective_scan_varlen, case.rounded(precision), EXACT, lengths, states, GPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_updates_at_a_real_shape(act: torch.dtype, state_dtype: torch.dtype) -> None:
    precision = Precision(act, state_dtype)
    op = TRITON.op("selective_state_update")
    for case in (SSDCase.draw(65, 65, 128, 64, 8, 128), ScanCase.draw(33, 33, 8192, 16)):
        got = run_update(op, case, precision, GPU, padding=3)
        plain = run_update(reference.selective_state_update, case, precision, GPU)
        exact = run_update(reference.selective_state_update, case.rounded(precision), EXACT, GPU)
        check(got[0], plain[0], exact[0], "output")
        check(got[1], plain[1], exact[1], "state")


NARROW = [
    Precision(torch.bfloat16, dtype, by_chance=by_chance)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    for by_chance in (False, True)
]


@pytest.mark.parametrize("precision", NARROW, ids=str)
def test_narrow_states_at_real_shapes(precision: Precision) -> None:
    op = TRITON.op("selective_state_update")
    for case in (
        SSDCase.draw(9, 9, 128, 64, 8, 128),
        SSDCase.draw(3, 3, 80, 64, 1, 128),
        ScanCase.draw(9, 9, 8192, 16),
    ):
        got = run_update(op, case, precision, GPU, padding=3)
        plain = run_update(reference.selective_state_update, case, precision, GPU)
        exact = run_update(reference.selective_state_update, case.rounded(precision), EXACT, GPU)
        check(got[0], plain[0], exact[0], "output")
        check(got[1], plain[1], exact[1], "state")
    case, precision = SSDCase.draw(300, 3, 16, 64, 2, 128), replace(precision, act=torch.float32)
    lengths, states = (200, 1, 99), (True, False, True)
    got = run_scan(TRITON.op("mamba_chunk_scan_varlen"), case, precision, lengths, states, GPU, chunk=64)
    plain = run_scan(reference.mamba_chunk_scan_varlen, case, precision, lengths, states, GPU)
    exact = run_scan(reference.mamba_chunk_scan_varlen, case.rounded(precision), EXACT, lengths, states, GPU)
    check(got[1], plain[1], exact[1], "state after a prompt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_each_graph_replay_draws_afresh(dtype: torch.dtype) -> None:
    """Seed and step are read from device memory: a replay after ``advance`` is the eager call of that step."""
    case = SSDCase.draw(4, 4, 8, 64, 1, 128).to(Precision(torch.bfloat16, torch.float32), GPU)
    slots = torch.tensor([4, 0, 2, 1], dtype=torch.int32, device=GPU)
    start, scale = (
        torch.zeros(5, 8, 64, 128, device=GPU).to(dtype),
        torch.zeros(5, 8, 64, device=GPU).bfloat16(),
    )
    store(start, scale, slots, case.state, NEAREST)
    op = TRITON.op("selective_state_update")

    def step(state: torch.Tensor, scales: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        return op(
            state, case.x, case.dt, case.A, case.B, case.C, case.D, case.z, case.dt_bias, slots,
            state_scale=scales, rounding=rounding,
        )  # fmt: skip

    def eager(number: int) -> torch.Tensor:
        state, rounding = start.clone(), stochastic(5, GPU).of_layer(1)
        rounding.step.fill_(number)
        step(state, scale.clone(), rounding)
        return state[1:].view(torch.uint8)

    rounding, state, scales = stochastic(5, GPU).of_layer(1), start.clone(), scale.clone()
    step(state, scales, rounding)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(state, scales, rounding)
    seen = []
    for number in range(3):
        state.copy_(start)
        scales.copy_(scale)
        graph.replay()
        seen.append(state[1:].view(torch.uint8).clone())
        assert torch.equal(seen[-1], eager(number))
        rounding.advance()
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_conv_at_a_real_shape(act: torch.dtype) -> None:
    lengths, states = (2, 1000, 1, 511, 3), (True, False, True, True, False)
    precision = Precision(act, torch.bfloat16)
    case = ConvCase.draw(sum(lengths), len(lengths), 10_240, 4)
    got = run_conv(TRITON.op("causal_conv1d_varlen"), case, precision, lengths, states, GPU, chunk=256)
    plain = run_conv(conv_reference.causal_conv1d_varlen, case, precision, lengths, states, GPU)
    exact = run_conv(
        conv_reference.causal_conv1d_varlen, case.rounded(precision), EXACT, lengths, states, GPU
    )
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "window")


def test_a_captured_graph_replays_the_update() -> None:
    """No synchronisation, no host data: capture succeeds and replay equals an eager call."""
    precision = Precision(torch.bfloat16, torch.float32)
    case = SSDCase.draw(8, 8, 16, 64, 2, 128).to(precision, GPU)
    conv = ConvCase.draw(8, 8, 1280, 4).to(precision, GPU)
    slots = torch.tensor([0, 8, 7, 6, 5, 4, 3, 0], dtype=torch.int32, device=GPU)
    update, shift = TRITON.op("selective_state_update"), TRITON.op("causal_conv1d_update")

    def step(ssm: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = update(ssm, case.x, case.dt, case.A, case.B, case.C, case.D, case.z, case.dt_bias, slots)
        return y, shift(conv.x, conv.weight, conv.bias, window, slots, silu=True)

    def states() -> tuple[torch.Tensor, torch.Tensor]:
        ssm = torch.cat([case.state[:1], case.state])
        return ssm, torch.cat([conv.state[:1], conv.state])

    eager_states, graph_states = states(), states()
    step(*states())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*graph_states)
    for _ in range(2):
        eager = step(*eager_states)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip((*eager, *eager_states), (*captured, *graph_states), strict=True):
            assert torch.equal(a, b)


def test_changing_lengths_compiles_nothing() -> None:
    """Compile keys hold no token or sequence count."""
    from triton import knobs

    compiled: list[str] = []
    op = TRITON.op("mamba_chunk_scan_varlen")
    scan, conv = TRITON.op("selective_scan_varlen"), TRITON.op("causal_conv1d_varlen")
    precision = Precision(torch.bfloat16, torch.float32)

    def all_three(lengths: tuple[int, ...]) -> None:
        states = tuple(i % 2 == 0 for i in range(len(lengths)))
        tokens = sum(lengths)
        run_scan(
            op, SSDCase.draw(tokens, len(lengths), 4, 64, 1, 64), precision, lengths, states, GPU, chunk=64
        )
        run_scan(scan, ScanCase.draw(tokens, len(lengths), 64, 16), precision, lengths, states, GPU)
        run_conv(conv, ConvCase.draw(tokens, len(lengths), 64, 4), precision, lengths, states, GPU)

    all_three((5, 64))
    knobs.runtime.jit_post_compile_hook = lambda *a, **k: compiled.append(str(k.get("fn", a)))
    try:
        # Not one token alone: PyTorch then gives an odd-strided view other strides, which are in the keys.
        for lengths in ((2,), (16,), (32, 16), (7, 9, 100), (1,) * 16):
            all_three(lengths)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled
