"""What is particular to the CPU's prefill: its tiles, its threads, its conversions and its cost.

That it computes the right thing is held by the tests of each operator, with every backend; here the
lengths are those around its own tile sizes, and the packings are drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import (
    EXACT,
    ConvCase,
    Precision,
    ScanCase,
    SSDCase,
    bounds,
    check,
    chunks_of,
    run_conv,
    run_scan,
    slots_for,
    tokens_of,
)
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.conv1d import cpu as conv
from recurra.ops.conv1d import reference as conv_reference
from recurra.ops.norm import cpu as norm
from recurra.ops.ssm import cpu as ssm
from recurra.ops.ssm import reference as ssm_reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
drawn = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the fixtures' poison fits every example
)
sequences = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3, 4, 7, 15, 16, 17, 63, 64, 65, 128, 130]), st.booleans()),
    min_size=1,
    max_size=4,
).map(lambda drawn: [*drawn, (33, True)])  # numbers enough for a relative error to mean something


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _judge_scan(case: Any, function: str, lengths: tuple[int, ...], known: tuple[bool, ...]) -> None:
    op, reference = getattr(ssm, function), getattr(ssm_reference, function)
    got = run_scan(op, case, FP32, lengths, known, CPU, chunk=256)
    plain = run_scan(reference, case, FP32, lengths, known, CPU)
    exact = run_scan(reference, case.rounded(FP32), EXACT, lengths, known, CPU)
    live = torch.tensor([n > 0 or k for n, k in zip(lengths, known, strict=True)])  # others hold poison
    check(got[0], plain[0], exact[0], "output")
    check(got[1][live], plain[1][live], exact[1][live], "state")


@drawn
@given(packed=sequences, size=st.sampled_from([16, 19, 48, 128]), channels=st.sampled_from([16, 40, 64, 100]))
def test_scan_of_any_packing(packed: list[tuple[int, bool]], size: int, channels: int) -> None:
    lengths, known = zip(*packed, strict=True)
    case = ScanCase.draw(sum(lengths), len(lengths), channels, size)
    _judge_scan(case, "selective_scan_varlen", lengths, known)


@drawn
@given(
    packed=sequences,
    size=st.sampled_from([16, 19, 128]),
    dim=st.sampled_from([9, 48, 64, 80, 112]),
    groups=st.sampled_from([1, 3]),
)
def test_ssd_of_any_packing(packed: list[tuple[int, bool]], size: int, dim: int, groups: int) -> None:
    lengths, known = zip(*packed, strict=True)
    case = SSDCase.draw(sum(lengths), len(lengths), 3, dim, groups, size)
    _judge_scan(case, "mamba_chunk_scan_varlen", lengths, known)


@drawn
@given(packed=sequences, width=st.integers(2, 5), channels=st.sampled_from([16, 100, 128, 200]))
def test_convolution_of_any_packing(packed: list[tuple[int, bool]], width: int, channels: int) -> None:
    lengths, known = zip(*packed, strict=True)
    case = ConvCase.draw(sum(lengths), len(lengths), channels, width)
    reference = conv_reference.causal_conv1d_varlen
    got = run_conv(conv.causal_conv1d_varlen, case, FP32, lengths, known, CPU)
    plain = run_conv(reference, case, FP32, lengths, known, CPU)
    exact = run_conv(reference, case.rounded(FP32), EXACT, lengths, known, CPU)
    live = torch.tensor([n > 0 or k for n, k in zip(lengths, known, strict=True)])
    check(got[0], plain[0], exact[0], "output")
    assert torch.equal(got[1][live].double(), exact[1][live])


def _calls(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Tensor]]:
    """A call of each operator on the same packing; each returns its output."""
    known = (True,) * len(lengths)
    act = Precision(dtype, torch.float32)
    tokens, rows = sum(lengths), len(lengths)
    scan, ssd = ScanCase.draw(tokens, rows, 200, 16), SSDCase.draw(tokens, rows, 6, 64, 1, 128)
    window = ConvCase.draw(tokens, rows, 300, 4)
    x, z, weight = torch.randn(tokens, 200).to(dtype), torch.randn(tokens, 200).to(dtype), torch.randn(200)
    return {
        "scan": lambda: run_scan(ssm.selective_scan_varlen, scan, act, lengths, known, CPU)[0],
        "ssd": lambda: run_scan(ssm.mamba_chunk_scan_varlen, ssd, act, lengths, known, CPU, chunk=64)[0],
        "convolution": lambda: run_conv(conv.causal_conv1d_varlen, window, act, lengths, known, CPU)[0],
        "norm": lambda: norm.rms_norm(x, weight, 1e-5),
        "gated norm": lambda: norm.rms_norm_gated(x, z, weight, 1e-5, 40),
    }


@pytest.mark.parametrize("name", ["scan", "ssd", "convolution", "norm", "gated norm"])
def test_threads_change_no_bit(name: str, threads: Callable[[int], None]) -> None:
    call = _calls((70, 1, 33))[name]
    threads(1)
    alone = call()
    for count in (2, 3, 5):
        threads(count)
        for _ in range(3):
            assert torch.equal(call(), alone), count
    assert torch.get_num_threads() == count, "an operator changed PyTorch's setting"


@pytest.mark.parametrize("name", ["scan", "ssd", "convolution", "norm", "gated norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_are_widened_and_the_result_rounded_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    got = _calls((20, 3), dtype)[name]()
    assert got.dtype == dtype
    assert got.isfinite().all()


def test_narrow_inputs_give_the_rounded_float32_answer() -> None:
    case = SSDCase.draw(30, 1, 2, 16, 1, 16)
    narrow = Precision(torch.bfloat16, torch.float32)
    got = run_scan(ssm.mamba_chunk_scan_varlen, case, narrow, (30,), (True,), CPU)
    same = case.to(narrow).to(FP32)
    wide = run_scan(ssm.mamba_chunk_scan_varlen, same, FP32, (30,), (True,), CPU)
    assert torch.equal(got[0], wide[0].bfloat16())
    assert torch.equal(got[1], wide[1])


def _ssd_arguments(lengths: tuple[int, ...], size: int = 16) -> dict[str, Any]:
    case = SSDCase.draw(sum(lengths), len(lengths), 2, 16, 1, size).to(FP32)
    return {
        "x": case.x, "dt": case.dt, "A": case.A, "B": case.B, "C": case.C, "D": case.D, "dt_bias": case.dt_bias,
        "ssm_state": torch.zeros(len(lengths) + 2, 2, 16, size), "cu_seqlens": bounds(lengths, CPU),
        "slots": slots_for(len(lengths), CPU), "has_state": torch.zeros(len(lengths), dtype=torch.bool),
        "chunks": chunks_of(lengths, 64, CPU),
    }  # fmt: skip


def test_dtypes_without_a_kernel_are_refused_by_name() -> None:
    arguments = _ssd_arguments((5,))
    with pytest.raises(ConfigError, match=r"mamba_ssm_cache_dtype='float64'.*\"float32\""):
        ssm.mamba_chunk_scan_varlen(**{**arguments, "ssm_state": arguments["ssm_state"].double()})
    with pytest.raises(ConfigError, match=r"torch\.float64.*can't take x"):
        ssm.mamba_chunk_scan_varlen(**{**arguments, "x": arguments["x"].double()})
    with pytest.raises(ConfigError, match=r"can't take x"):
        norm.rms_norm(torch.zeros(2, 4, dtype=torch.float64), None, 1e-5)


def test_states_that_are_not_contiguous_within_a_slot() -> None:
    arguments = _ssd_arguments((5, 70))
    straight = arguments["ssm_state"]
    bent = torch.zeros(4, 2, 16, 16).transpose(2, 3)
    y = ssm.mamba_chunk_scan_varlen(**arguments)
    same = ssm.mamba_chunk_scan_varlen(**{**arguments, "ssm_state": bent})
    assert torch.equal(y, same)
    assert torch.equal(bent, straight)
    assert straight[2].abs().sum() > 0


@pytest.mark.parametrize("function", ["selective_scan_varlen", "mamba_chunk_scan_varlen"])
def test_a_nan_spreads_forward_in_its_own_sequence_alone(function: str) -> None:
    lengths, known = (70, 90, 20), (True, True, True)
    case: Any = (
        ScanCase.draw(180, 3, 20, 16)
        if function.startswith("selective")
        else SSDCase.draw(180, 3, 2, 16, 1, 16)
    )
    case.dt[70 + 66] = float("nan")
    y, state = run_scan(getattr(ssm, function), case, FP32, lengths, known, CPU)
    bad = torch.zeros(180, dtype=torch.bool)
    bad[70 + 66 : 160] = True
    assert torch.equal(y.flatten(1).isnan().all(1), bad)
    assert torch.equal(y.flatten(1).isnan().any(1), bad)
    assert state.flatten(1).isnan().all(1).tolist() == [False, True, False]


def test_the_callers_floating_point_mode_comes_back() -> None:
    ssm.mamba_chunk_scan_varlen(**_ssd_arguments((70,)))
    assert (torch.tensor([1e-30]) * torch.tensor([1e-12])).item() > 0, "subnormal numbers are still flushed"


def _cost(call: Callable[[], object]) -> float:
    """CPU seconds of the calling thread, the least of several: what a busy machine leaves alone."""
    call()
    times = []
    for _ in range(7):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


@pytest.mark.parametrize("strong", [False, True], ids=["gentle", "strong decay"])
@pytest.mark.parametrize("function", ["selective_scan_varlen", "mamba_chunk_scan_varlen"])
def test_cost_grows_with_the_tokens_and_no_faster(
    function: str, strong: bool, threads: Callable[[int], None]
) -> None:
    """1,024 tokens at most 10 times 128; as many tokens in 32 sequences at most 3 times one; decays to
    below the normal numbers cost no more."""
    threads(1)

    def seconds(lengths: tuple[int, ...]) -> float:
        tokens, rows = sum(lengths), len(lengths)
        case: Any = (
            ScanCase.draw(tokens, rows, 64, 16)
            if function.startswith("selective")
            else SSDCase.draw(tokens, rows, 2, 64, 1, 128)
        )
        case = replace(case, A=case.A * (200 if strong else 1)).to(FP32)
        state = torch.zeros(rows + 1, *case.state.shape[1:])
        slots = torch.arange(1, rows + 1, dtype=torch.int32)
        rest = (state, bounds(lengths, CPU), slots, slots > 0, chunks_of(lengths, 64, CPU))
        z = (case.z,) if isinstance(case, ScanCase) else ()
        op = getattr(ssm, function)
        return _cost(lambda: op(case.x, case.dt, case.A, case.B, case.C, case.D, *z, case.dt_bias, *rest))

    short, long = seconds((128,)), seconds((1024,))
    assert long <= 10 * short, (long, short)
    assert seconds((7,) * 32) <= 3 * seconds((224,))
    if strong:
        assert long <= 0.05, long  # 15 times slower with subnormal numbers


def test_split_at_random_points_equals_whole() -> None:
    case = SSDCase.draw(200, 1, 2, 48, 1, 20)
    generator = torch.Generator().manual_seed(3)
    cuts = [0, *sorted(torch.randperm(199, generator=generator)[:6].add(1).tolist()), 200]
    op, reference = ssm.mamba_chunk_scan_varlen, ssm_reference.mamba_chunk_scan_varlen
    parts, state = [], case.to(FP32).state
    for begin, end in pairwise(cuts):
        part = replace(tokens_of(case, slice(begin, end)), state=state)
        y, state = run_scan(op, part, FP32, (end - begin,), (True,), CPU, chunk=64)
        parts.append(y)
    plain = run_scan(reference, case, FP32, (200,), (True,), CPU)
    exact = run_scan(reference, case.rounded(FP32), EXACT, (200,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")
