"""Calls written for mamba_ssm, causal_conv1d and vLLM, over the grids of their own operator tests, against float64.

The definitions here are written from the maths, token by token, in float64, and share no code with the wrappers.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat import causal_conv1d, fla, mamba_ssm, vllm

#: Relative error that a dtype is allowed, of the largest number.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "output") -> None:
    assert got.shape == exact.shape, (what, got.shape, exact.shape)
    difference = (got.double().cpu() - exact.double().cpu()).abs().max().item() if exact.numel() else 0.0
    allowed = TOLERANCE[dtype] * max(1.0, exact.abs().max().item() if exact.numel() else 1.0)
    assert difference <= allowed, f"{what}: {difference:.2e} > {allowed:.2e}"


def wide(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.double().cpu() for t in tensors]


# --- definitions ---------------------------------------------------------------------------------


def conv_exact(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, silu: bool) -> Tensor:
    """x (channels, length) behind its window (channels, W - 1)."""
    u = torch.cat([before, x], dim=1)
    y = torch.stack([(u[:, t : t + weight.shape[1]] * weight).sum(1) for t in range(x.shape[1])], 1)
    y = y if bias is None else y + bias[:, None]
    return F.silu(y) if silu else y


def scan_exact(
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """x, step, z (length, H, P); A (H, P, N); B, C (length, H, N); D (H, P); state (H, P, N)."""
    out = []
    for t in range(x.shape[0]):
        state = torch.exp(step[t][..., None] * A) * state + (step[t] * x[t])[..., None] * B[t][:, None]
        y = (state * C[t][:, None]).sum(-1)
        y = y if D is None else y + D * x[t]
        out.append(y if z is None else y * F.silu(z[t]))
    return (torch.stack(out) if out else x), state


# --- causal_conv1d -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "bias", "silu"), [(2, True, True), (3, False, False), (4, True, True), (5, True, False)]
)
@pytest.mark.parametrize("channel_last", [False, True])
def test_conv_fn(device: torch.device, width: int, bias: bool, silu: bool, channel_last: bool) -> None:
    for dtype, length, states in (
        (torch.float32, 1, True),
        (torch.bfloat16, 17, False),
        (torch.float16, 70, True),
    ):
        x = rand(2, length, 9, dtype=dtype, device=device).transpose(1, 2)
        x = x if channel_last else x.contiguous()
        weight, offset = rand(9, width, dtype=dtype, device=device), rand(9, dtype=dtype, device=device)
        before = rand(2, 9, width - 1, dtype=dtype, device=device) if states else None
        y, final = causal_conv1d.causal_conv1d_fn(
            x, weight, offset if bias else None, initial_states=before, return_final_states=True,
            activation="silu" if silu else None,
        )  # fmt: skip
        xs, ws, bs, ss = wide(x, weight, offset if bias else None, before)
        ss = torch.zeros(2, 9, width - 1).double() if ss is None else ss
        close(y, torch.stack([conv_exact(xs[b], ws, bs, ss[b], silu) for b in range(2)]), dtype)
        assert torch.equal(final.double().cpu(), torch.cat([ss, xs], 2)[:, :, length:])


def test_conv_fn_of_several_sequences_a_row(device: torch.device) -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 2, 2, 2, -1], [5, 5, 5, 5, 5, 6, -1, -1]], dtype=torch.int32)
    x, weight = rand(2, 6, 8, device=device), rand(6, 4, device=device)
    y = causal_conv1d.causal_conv1d_fn(x, weight, None, seq_idx=numbers.to(device), activation="swish")
    xs, ws = wide(x, weight)
    for row, begin, end in ((0, 0, 3), (0, 3, 4), (0, 4, 7), (1, 0, 5), (1, 5, 6)):
        exact = conv_exact(xs[row][:, begin:end], ws, None, torch.zeros(6, 3).double(), True)
        close(y[row][:, begin:end], exact, torch.float32)
    assert not y[0, :, 7].any()
    assert not y[1, :, 6:].any()


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("count", [None, 1, 3])
def test_conv_update(device: torch.device, count: int | None, ring: bool) -> None:
    for dtype, width, length in product((torch.float32, torch.bfloat16), (2, 4), (3, 6)):
        if ring and length < width - 1 + (count or 1):
            continue
        shape = (3, 7) if count is None else (3, 7, count)
        x, weight, bias = (rand(*s, dtype=dtype, device=device) for s in (shape, (7, width), (7,)))
        state = rand(9, 7, length, dtype=dtype, device=device)
        entries = torch.tensor([4, 0, 8], dtype=torch.int32, device=device)
        filled = torch.tensor([5, 2, 11], dtype=torch.int32, device=device) if ring else None
        old = state.double().cpu()
        y = causal_conv1d.causal_conv1d_update(x, state, weight, bias, "silu", filled, entries)
        xs, ws, bs = wide(x, weight, bias)
        xs = xs[..., None] if count is None else xs
        new = old.clone()
        for row, entry in enumerate([4, 0, 8]):
            history = old[entry]
            if filled is not None:
                history = torch.roll(history, -(int(filled[row]) % length), 1)
            exact = conv_exact(xs[row], ws, bs, history[:, length - width + 1 :], True)
            close(y[row], exact[:, 0] if count is None else exact, dtype)
            moved = torch.cat([history, xs[row]], 1)[:, xs.shape[2] :]
            if filled is not None:
                moved = torch.roll(moved, (int(filled[row]) + xs.shape[2]) % length, 1)
            new[entry] = moved
        assert torch.equal(state.double().cpu(), new)


# --- mamba_ssm: the scans ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "groups"), [(1, 0), (37, 0), (37, 2), (70, 1)])
def test_selective_scan_fn(device: torch.device, length: int, groups: int) -> None:
    for dtype, optional, softplus in (
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.bfloat16, True, True),
    ):
        u, z = rand(2, 8, length, dtype=dtype, device=device), rand(2, 8, length, dtype=dtype, device=device)
        delta = 0.5 * torch.rand(2, 8, length).to(device, dtype)
        A = -torch.rand(8, 5, device=device) * 0.5
        shape = (2, groups, 5, length) if groups else (2, 5, length)
        B, C = rand(*shape, dtype=dtype, device=device), rand(*shape, dtype=dtype, device=device)
        D, bias = rand(8, device=device), 0.5 * torch.rand(8, device=device)
        if not optional:
            z = D = bias = None
        y, state = mamba_ssm.selective_scan_fn(
            u, delta, A, B, C, D, z, bias, softplus, return_last_state=True
        )
        us, ds, As, Bs, Cs, Ds, zs, bs = wide(u, delta, A, B, C, D, z, bias)
        ds = ds if bs is None else ds + bs[:, None]
        ds = F.softplus(ds) if softplus else ds
        per_group = 8 // max(1, groups)
        for b in range(2):
            keys = [(t[b] if groups else t[b][None]).repeat_interleave(per_group, 0) for t in (Bs, Cs)]
            exact, last = scan_exact(
                us[b].T[..., None], ds[b].T[..., None], As[:, None], *(k.permute(2, 0, 1) for k in keys),
                None if Ds is None else Ds[:, None], None if zs is None else zs[b].T[..., None],
                torch.zeros(8, 1, 5).double(),
            )  # fmt: skip
            close(y[b], exact[..., 0].T, dtype)
            close(state[b], last[:, 0], dtype, "state")


def _ssd(
    batch: int, length: int, dtype: torch.dtype, device: torch.device, dim: int = 6, size: int = 5
) -> dict[str, Any]:
    heads, groups = 4, 2
    return {
        "x": rand(batch, length, heads, dim, dtype=dtype, device=device),
        "dt": rand(batch, length, heads, dtype=dtype, device=device) - 1,
        "A": -torch.exp(torch.rand(heads, device=device) - 1),
        "B": rand(batch, length, groups, size, dtype=dtype, device=device),
        "C": rand(batch, length, groups, size, dtype=dtype, device=device),
    }


def _ssd_exact(
    case: dict[str, Any], row: int, span: slice, state: Tensor | None = None, *, D: Tensor | None = None,
    z: Tensor | None = None, bias: Tensor | None = None, limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x, dt, A, B, C = (t.double().cpu() for t in case.values())
    step = dt[row, span] if bias is None else dt[row, span] + bias.double().cpu()
    step = F.softplus(step).clamp(*limit)
    heads, dim, size = x.shape[2], x.shape[3], B.shape[3]
    skip = None
    if D is not None:
        skip = D.double().cpu()
        skip = skip if skip.dim() == 2 else skip[:, None]
    per_group = heads // B.shape[2]
    return scan_exact(
        x[row, span], step[..., None].expand(-1, -1, dim), A[:, None, None],
        *(t[row, span].repeat_interleave(per_group, 1) for t in (B, C)), skip,
        None if z is None else z.double().cpu()[row, span],
        torch.zeros(heads, dim, size).double() if state is None else state.double().cpu(),
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 31, 70])
@pytest.mark.parametrize(
    ("wide_skip", "gated", "initial"), [(False, False, False), (True, True, True), (False, True, False)]
)
def test_chunk_scan(device: torch.device, length: int, wide_skip: bool, gated: bool, initial: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = _ssd(2, length, dtype, device)
        D = rand(4, 6, device=device) if wide_skip else rand(4, device=device)
        z = rand(*case["x"].shape, dtype=dtype, device=device) if gated else None
        bias = rand(4, device=device) if initial else None
        start = rand(2, 4, 6, 5, device=device) if initial else None
        limit = (0.05, 0.5) if initial else (0.0, float("inf"))
        y, final = mamba_ssm.mamba_chunk_scan_combined(
            **case, chunk_size=32, D=D, z=z, dt_bias=bias, initial_states=start, dt_softplus=True, dt_limit=limit,
            return_final_states=True,
        )  # fmt: skip
        for b in range(2):
            exact, last = _ssd_exact(
                case, b, slice(None), None if start is None else start[b], D=D, z=z, bias=bias, limit=limit
            )
            close(y[b], exact, dtype)
            close(final[b], last, dtype, "state")


@pytest.mark.parametrize(("dim", "size"), [(48, 96), (80, 112)])
@pytest.mark.parametrize("chunk", [64, 256])
def test_chunk_scan_of_odd_sizes(device: torch.device, dim: int, size: int, chunk: int) -> None:
    case = _ssd(1, 67, torch.float32, device, dim, size)
    y = mamba_ssm.mamba_chunk_scan_combined(**case, chunk_size=chunk, dt_softplus=True)
    close(y[0], _ssd_exact(case, 0, slice(None))[0], torch.float32)


def test_chunk_scan_of_several_sequences_a_row(device: torch.device) -> None:
    case, lengths = _ssd(1, 40, torch.float32, device), (13, 1, 0, 26)
    numbers = torch.tensor([[0] * 13 + [1] + [3] * 26], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 13, 14, 14, 40], dtype=torch.int32, device=device)
    start = rand(1, 4, 6, 5, device=device)
    options: dict[str, Any] = {
        "chunk_size": 16,
        "dt_softplus": True,
        "seq_idx": numbers,
        "initial_states": start,
    }
    y, final, states = mamba_ssm.mamba_chunk_scan_combined(
        **case, **options, cu_seqlens=cu, return_final_states=True, return_varlen_states=True
    )
    plain = mamba_ssm.mamba_chunk_scan_combined(**case, **options)
    assert torch.equal(y, plain)
    assert torch.equal(final[0], states[3])
    begin = 0
    for s, length in enumerate(lengths):
        exact, last = _ssd_exact(case, 0, slice(begin, begin + length), start[0] if s == 0 else None)
        close(y[0, begin : begin + length], exact, torch.float32)
        close(states[s], last, torch.float32, "state")
        begin += length


def test_chunk_scan_from_its_parts(device: torch.device) -> None:
    case, chunk = _ssd(2, 40, torch.float32, device), 16
    start, D = rand(2, 4, 6, 5, device=device), rand(4, device=device)
    z = rand(*case["x"].shape, device=device)
    sums, steps = mamba_ssm.chunk_cumsum(case["dt"], case["A"], chunk, dt_softplus=True)
    own = mamba_ssm.ssd_chunk_state(case["B"], case["x"], steps, sums)
    before, final = mamba_ssm.ssd_state_passing(own.flatten(-2), sums[..., -1], start.flatten(-2))
    cb = mamba_ssm.ssd_bmm(case["C"], case["B"], chunk)
    assert cb.shape == (2, 3, 2, chunk, chunk)
    y = mamba_ssm.ssd_chunk_scan(cb, case["x"], steps, sums, case["C"], before.unflatten(-1, (6, 5)), D, z)
    for b in range(2):
        exact, last = _ssd_exact(case, b, slice(None), start[b], D=D, z=z)
        close(y[b], exact, torch.float32)
        close(final[b], last.flatten(-2), torch.float32, "state")


def test_parts_keep_sequences_apart(device: torch.device) -> None:
    case, chunk = _ssd(1, 40, torch.float32, device), 16
    numbers = torch.tensor([[0] * 20 + [1] * 20], dtype=torch.int32, device=device)
    sums, steps = mamba_ssm.chunk_cumsum(case["dt"], case["A"], chunk, dt_softplus=True)
    own = mamba_ssm.ssd_chunk_state(case["B"], case["x"], steps, sums, numbers)
    _, final = mamba_ssm.ssd_state_passing(own.flatten(-2), sums[..., -1], None, numbers, chunk)
    close(final[0], _ssd_exact(case, 0, slice(20, 40))[1].flatten(-2), torch.float32, "state")
    cb = mamba_ssm.ssd_bmm(case["C"], case["B"], chunk, numbers)
    assert not cb[0, 1, :, 4:, :4].any()
    assert cb[0, 1, :, 4:, 4:].all()


# --- mamba_ssm and vLLM: the update --------------------------------------------------------------


def _update_case(form: str, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if form == "channels":
        return {
            "x": rand(rows, 22, dtype=dtype, device=device),
            "dt": rand(rows, 22, dtype=dtype, device=device),
            "A": -torch.rand(22, 5, device=device) - 1,
            "B": rand(rows, 5, device=device), "C": rand(rows, 5, device=device),
            "D": rand(22, device=device), "dt_bias": torch.rand(22, device=device) - 4,
        }  # fmt: skip
    case: dict[str, Any] = {
        "x": rand(rows, 4, 6, dtype=dtype, device=device),
        "B": rand(rows, 2, 5, device=device),
        "C": rand(rows, 2, 5, device=device),
    }
    if form == "tied":
        return case | {
            "dt": rand(rows, 4, dtype=dtype, device=device)[..., None].expand(-1, -1, 6),
            "A": (-torch.rand(4, device=device) - 1)[:, None, None].expand(-1, 6, 5),
            "D": rand(4, device=device)[:, None].expand(-1, 6),
            "dt_bias": (torch.rand(4, device=device) - 4)[:, None].expand(-1, 6),
        }
    return case | {
        "dt": rand(rows, 4, 6, dtype=dtype, device=device),
        "A": -torch.rand(4, 6, 5, device=device) - 1,
        "D": rand(4, 6, device=device),
        "dt_bias": torch.rand(4, 6, device=device) - 4,
    }


def _update_exact(
    case: dict[str, Any], rows: list[int], z: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Steps of the rows in order from one state, as (H, P, N)."""
    x, dt, A, B, C, D, bias = wide(*(case[k] for k in ("x", "dt", "A", "B", "C", "D", "dt_bias")))
    if x.dim() == 2:
        x, dt, A, D, bias, B, C = (
            x[:, None],
            dt[:, None],
            A[None],
            D[None],
            bias[None],
            B[:, None],
            C[:, None],
        )
    per_group = x.shape[1] // B.shape[1]
    gate = None if z is None else z.double().cpu().view(x.shape)[rows]
    return scan_exact(
        x[rows], F.softplus(dt[rows] + bias), A, *(t[rows].repeat_interleave(per_group, 1) for t in (B, C)), D, gate,
        state.double().cpu().view(A.shape),
    )  # fmt: skip


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("form", ["channels", "tied", "untied"])
def test_state_update(device: torch.device, form: str, indexed: bool) -> None:
    for dtype, gated in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, True)):
        case = _update_case(form, 3, dtype, device)
        z = rand(*case["x"].shape, dtype=dtype, device=device) if gated else None
        shape = (9, *case["A"].shape)
        state = (
            rand(*shape, dtype=dtype, device=device)
            if indexed
            else rand(3, *shape[1:], dtype=dtype, device=device)
        )
        old, entries = state.clone(), [8, 0, 3] if indexed else [0, 1, 2]
        indices = torch.tensor(entries, dtype=torch.int32, device=device) if indexed else None
        y = mamba_ssm.selective_state_update(
            state, z=z, dt_softplus=True, state_batch_indices=indices, **case
        )
        for row, entry in enumerate(entries):
            exact, last = _update_exact(case, [row], z, old[entry])
            close(y[row], exact[0].view(y[row].shape), dtype)
            close(state[entry], last.view(state[entry].shape), dtype, "state")
        others = [e for e in range(state.shape[0]) if e not in entries]
        assert torch.equal(state[others], old[others])


@pytest.mark.parametrize("form", ["channels", "tied", "untied"])
@pytest.mark.parametrize("pad", [-1, 0])
def test_state_update_of_vllm(device: torch.device, form: str, pad: int) -> None:
    """Several tokens a sequence, other entries to write to, accepted counts, padding, out."""
    case = _update_case(form, 6, torch.float32, device)
    cu = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device)
    state = rand(12, *case["A"].shape, device=device)
    old, out = state.clone(), torch.empty_like(case["x"])
    source = torch.tensor([[2, 3, 4], [5, 6, 7], [pad, pad, pad]], dtype=torch.int32, device=device)
    target = torch.tensor([[2, pad, pad], [8, 9, 10], [1, 1, 1]], dtype=torch.int32, device=device)
    accepted = torch.tensor([3, 1, 1], dtype=torch.int32, device=device)
    vllm.selective_state_update(
        state, dt_softplus=True, state_batch_indices=source, dst_state_batch_indices=target, pad_slot_id=pad, out=out,
        num_accepted_tokens=accepted, cu_seqlens=cu, **case,
    )  # fmt: skip
    for rows, entry, writes in (([0], 4, {2: 1}), ([1, 2, 3], 5, {8: 1, 9: 2, 10: 3})):
        exact, _ = _update_exact(case, rows, None, old[entry])
        close(out[rows], exact.view(out[rows].shape), torch.float32)
        for written, count in writes.items():
            _, last = _update_exact(case, rows[:count], None, old[entry])
            close(state[written], last.view(state[written].shape), torch.float32, "state")
    assert not out[4:].any()
    for entry in (0, 1, 3, 4, 5, 6, 7, 11):
        assert torch.equal(state[entry], old[entry]), entry
    # Without accepted counts: first column in, last state to the first column out.
    state = old.clone()
    vllm.selective_state_update(
        state, dt_softplus=True, state_batch_indices=source, dst_state_batch_indices=target, pad_slot_id=pad, out=out,
        cu_seqlens=cu, **case,
    )  # fmt: skip
    close(
        state[8], _update_exact(case, [1, 2, 3], None, old[5])[1].view(state[8].shape), torch.float32, "state"
    )
    assert torch.equal(state[9], old[9])


def test_stochastic_rounding_of_vllm(device: torch.device) -> None:
    case = _update_case("tied", 2, torch.float32, device)
    state = rand(2, *case["A"].shape, dtype=torch.float16, device=device)
    other = state.clone()
    for target in (state, other):
        vllm.selective_state_update(
            target, dt_softplus=True, enable_stochastic_rounding=True, cache_philox_rounds=4, **case
        )
    assert not torch.equal(state, other)
    torch.testing.assert_close(state, other, rtol=2e-3, atol=2e-3)


# --- vLLM: packed sequences ----------------------------------------------------------------------


def test_vllm_conv_fn(device: torch.device) -> None:
    for dtype, width, longer in ((torch.float32, 4, 0), (torch.bfloat16, 2, 3)):
        lengths, entries, known = (5, 1, 9, 2), [3, 0, 7, -1], [True, False, True, True]
        x = rand(17, 6, dtype=dtype, device=device).t()
        weight, bias = rand(6, width, dtype=dtype, device=device), rand(6, dtype=dtype, device=device)
        states = rand(9, width - 1 + longer, 6, dtype=dtype, device=device).transpose(1, 2)
        old = states.clone()
        cu = torch.tensor([0, 5, 6, 15, 17], dtype=torch.int32, device=device)
        y = vllm.causal_conv1d_fn(
            x, weight, bias, states, cu, torch.tensor(entries, dtype=torch.int32, device=device),
            torch.tensor(known, device=device), "silu",
        )  # fmt: skip
        xs, ws, bs, before = wide(x, weight, bias, old)
        begin = 0
        for length, entry, has in zip(lengths, entries, known, strict=True):
            span = slice(begin, begin + length)
            begin += length
            if entry < 0:
                assert not y[:, span].any()
                continue
            window = before[entry][:, : width - 1] * has
            close(y[:, span], conv_exact(xs[:, span], ws, bs, window, True), dtype)
            after = torch.cat([window, xs[:, span]], 1)[:, length:]
            assert torch.equal(states[entry].double().cpu()[:, : width - 1], after)
        untouched = [e for e in range(9) if e not in entries]
        assert torch.equal(states[untouched], old[untouched])
        assert torch.equal(states[:, :, width - 1 :], old[:, :, width - 1 :])


def test_vllm_conv_update_speculates(device: torch.device) -> None:
    width, channels = 4, 5
    x, weight = rand(6, channels, device=device), rand(channels, width, device=device)
    state = rand(8, channels, width - 1 + 2, device=device)
    old = state.double().cpu()
    cu = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device)
    y = vllm.causal_conv1d_update(
        x, state, weight, None, "silu", torch.tensor([2, 5, 0], dtype=torch.int32, device=device),
        torch.tensor([2, 3, 1], dtype=torch.int32, device=device), cu, 3, null_block_id=0,
    )  # fmt: skip
    xs, ws = wide(x, weight)
    for entry, accepted, begin, end in ((2, 2, 0, 3), (5, 3, 3, 4)):
        window = old[entry][:, accepted - 1 : accepted + 2]
        close(y[begin:end].t(), conv_exact(xs[begin:end].t(), ws, None, window, True), torch.float32)
        after = torch.cat([window[:, 1:], xs[begin:end].t()], 1)
        assert torch.equal(state[entry].double().cpu()[:, : after.shape[1]], after)
    assert not y[4:].any()
    assert torch.equal(state[0].double().cpu(), old[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_vllm_selective_scan_fn(device: torch.device, groups: int) -> None:
    lengths, entries, known = (5, 1, 33, 2), [3, 0, 7, -1], [True, False, True, True]
    u, delta, z = rand(8, 41, device=device), rand(8, 41, device=device), rand(8, 41, device=device)
    A, D, bias = -torch.rand(8, 5, device=device), rand(8, device=device), rand(8, device=device)
    B, C = rand(groups, 5, 41, device=device), rand(groups, 5, 41, device=device)
    states = rand(9, 8, 5, device=device)
    old = states.clone()
    y = vllm.selective_scan_fn(
        u, states, delta, A, B, C, D, z, bias, True, torch.tensor([0, 5, 6, 39, 41], dtype=torch.int32, device=device),
        torch.tensor(entries, dtype=torch.int32, device=device), torch.tensor(known, device=device),
    )  # fmt: skip
    us, ds, zs, As, Ds, bs, Bs, Cs, before = wide(u, delta, z, A, D, bias, B, C, old)
    keys = [t.repeat_interleave(8 // groups, 0).permute(2, 0, 1) for t in (Bs, Cs)]
    begin = 0
    for length, entry, has in zip(lengths, entries, known, strict=True):
        span = slice(begin, begin + length)
        begin += length
        if entry < 0:
            assert not y[:, span].any()
            continue
        exact, last = scan_exact(
            us[:, span].T[..., None], F.softplus(ds[:, span].T + bs)[..., None], As[:, None], *(k[span] for k in keys),
            Ds[:, None], zs[:, span].T[..., None], before[entry][:, None] * has,
        )  # fmt: skip
        close(y[:, span], exact[..., 0].T, torch.float32)
        close(states[entry], last[:, 0], torch.float32, "state")
    assert torch.equal(states[[1, 2, 4, 5, 6, 8]], old[[1, 2, 4, 5, 6, 8]])


@pytest.mark.parametrize("initial", [True, False])
def test_vllm_chunk_scan(device: torch.device, initial: bool) -> None:
    case = {k: v if k == "A" else v[0] for k, v in _ssd(1, 41, torch.float32, device).items()}
    lengths = (5, 1, 35)
    cu = torch.tensor([0, 5, 6, 41], dtype=torch.int32, device=device)
    # The first chunk of the last sequence is a short one: it goes on in the middle of a block.
    cuts, owner = [0, 5, 6, 10, 26, 41], [0, 1, 2, 2, 2]
    start, D = rand(3, 4, 6, 5, device=device) if initial else None, rand(4, device=device)
    z, out = rand(41, 4, 6, device=device), torch.empty(41, 4, 6, device=device)
    arguments: dict[str, Any] = {
        "chunk_size": 16, "cu_seqlens": cu, "cu_chunk_seqlens": torch.tensor(cuts, dtype=torch.int32, device=device),
        "last_chunk_indices": torch.tensor([0, 1, 4], device=device), "seq_idx": torch.tensor(owner, device=device), "out": out,
        "D": D, "z": z, "initial_states": start, "dt_softplus": True,
    }  # fmt: skip
    states = vllm.mamba_chunk_scan_combined_varlen(**case, **arguments)
    middle = vllm.mamba_chunk_scan_combined_varlen(
        **case, **arguments, return_intermediate_states=True, state_dtype=torch.bfloat16
    )
    assert middle.dtype == torch.bfloat16
    batched = {k: v if k == "A" else v[None] for k, v in case.items()}
    begin = 0
    for s, length in enumerate(lengths):
        first = None if start is None else start[s]
        exact, last = _ssd_exact(batched, 0, slice(begin, begin + length), first, D=D, z=z[None])
        close(out[begin : begin + length], exact, torch.float32)
        close(states[s], last, torch.float32, "state")
        for k, number in enumerate(owner):
            if number == s:
                _, after = _ssd_exact(batched, 0, slice(begin, cuts[k + 1]), first)
                close(middle[k], after, torch.bfloat16, f"chunk {k}")
        begin += length


# --- fla -----------------------------------------------------------------------------------------


def delta_exact(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (length, H, .), g (length, H) or (length, H, K), state (H, K, V); q and k brought to length 1."""
    q, k = (t / torch.sqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    out = []
    for t in range(q.shape[0]):
        decay = g[t].exp()
        state = state * (decay[:, :, None] if decay.dim() == 2 else decay[:, None, None])
        u = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * u[:, None]
        out.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out), state


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gated_delta_rule(device: torch.device, packed: bool, by_channel: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        lengths, rows = ((70, 1, 9), 1) if packed else ((80, 80), 2)
        q, k = (rand(rows, 80, 2, 16, dtype=dtype, device=device) for _ in range(2))
        v = rand(rows, 80, 4, 8, dtype=dtype, device=device)
        g = -torch.rand(rows, 80, 4, *([16] if by_channel else [])).to(device) * 0.3
        beta = torch.rand(rows, 80, 4).to(device, dtype)
        start = rand(len(lengths), 4, 16, 8, device=device)
        cu = torch.tensor([0, 70, 71, 80], device=device) if packed else None
        y, final = fla.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            None,
            start,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu,
        )
        assert final is not None
        flat = [t.double().cpu().flatten(0, 1) for t in (q, k, v, g, beta)]
        flat[:2] = (t.repeat_interleave(2, 1) for t in flat[:2])
        begin = 0
        for s, length in enumerate(lengths):
            part = (t[begin : begin + length] for t in flat)
            exact, last = delta_exact(*part, start[s].double().cpu(), 0.25)
            close(y.flatten(0, 1)[begin : begin + length], exact, dtype)
            close(final[s], last, dtype, "state")
            begin += length


def test_gated_delta_rule_step_by_step(device: torch.device) -> None:
    q, k, v = (
        rand(2, 5, 2, 16, device=device),
        rand(2, 5, 2, 16, device=device),
        rand(2, 5, 4, 8, device=device),
    )
    g, beta = -torch.rand(2, 5, 4).to(device), torch.rand(2, 5, 4).to(device)
    y, final = fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, output_final_state=True)
    state, steps = None, []
    for t in range(5):
        now = slice(t, t + 1)
        o, state = fla.fused_recurrent_gated_delta_rule(
            q[:, now],
            k[:, now],
            v[:, now],
            g[:, now],
            beta=beta[:, now],
            initial_state=state,
            output_final_state=True,
        )
        steps.append(o)
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(state, final, rtol=1e-3, atol=1e-3)


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "gated", "before"),
    [(False, True, True), (True, True, False), (True, True, True), (False, False, True)],
)
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("rms", [True, False])
def test_norms(
    device: torch.device, rms: bool, group: int | None, bias: bool, gated: bool, before: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, z = rand(2, 3, 24, dtype=dtype, device=device), rand(2, 3, 24, dtype=dtype, device=device)
        weight, offset = rand(24, device=device), rand(24, device=device) if bias else None
        function = mamba_ssm.rmsnorm_fn if rms else mamba_ssm.layernorm_fn
        y = function(x, weight, offset, z if gated else None, 1e-3, group, before)
        xs, zs, ws, bs = wide(x, z, weight, offset)
        gate = F.silu(zs) if gated else 1.0
        v = (xs if before else xs * gate).unflatten(-1, (-1, group or 24))
        v = v if rms else v - v.mean(-1, keepdim=True)
        v = (v / torch.sqrt(v.square().mean(-1, keepdim=True) + 1e-3)).flatten(-2) * ws
        v = v if bs is None else v + bs
        close(y, v * gate if before else v, dtype)


def test_norm_module(device: torch.device) -> None:
    norm = mamba_ssm.RMSNorm(24, group_size=8, norm_before_gate=False, device=device)
    x, z = rand(3, 24, device=device), rand(3, 24, device=device)
    with torch.no_grad():
        torch.testing.assert_close(
            norm(x, z), mamba_ssm.rmsnorm_fn(x, norm.weight, None, z, 1e-5, 8, norm_before_gate=False)
        )


# --- names ---------------------------------------------------------------------------------------


def test_public_names() -> None:
    from recurra import ops

    assert ops.causal_conv1d_fn is causal_conv1d.causal_conv1d_fn
    assert ops.mamba_chunk_scan_combined_varlen is vllm.mamba_chunk_scan_combined_varlen
    assert ops.selective_state_update is mamba_ssm.selective_state_update
    assert ops.chunk_gated_delta_rule is fla.chunk_gated_delta_rule
    for name in ops._PUBLIC:
        assert callable(getattr(ops, name)), name
        assert name in dir(ops)
    with pytest.raises(AttributeError, match="no attribute 'mamba4'"):
        _ = ops.mamba4


# --- refusals ------------------------------------------------------------------------------------


def test_refusals_name_the_argument() -> None:
    x, weight = rand(1, 4, 6), rand(4, 4)
    scan = [rand(1, 4, 6), rand(1, 4, 6), -torch.rand(4, 3), rand(1, 3, 6), rand(1, 3, 6)]
    ssd = _ssd(1, 6, torch.float32, torch.device("cpu"))
    numbers = torch.zeros(1, 6, dtype=torch.int32)
    for word, call in {
        "causal_conv1d_fn: activation: 'gelu'": lambda: causal_conv1d.causal_conv1d_fn(x, weight, activation="gelu"),
        "weight: width 7": lambda: causal_conv1d.causal_conv1d_fn(x, rand(4, 7)),
        "seq_idx": lambda: causal_conv1d.causal_conv1d_fn(x, weight, seq_idx=numbers, return_final_states=True),
        "selective_scan_fn: A: torch.complex64": lambda: mamba_ssm.selective_scan_fn(
            *scan[:2], scan[2].to(torch.complex64), *scan[3:]
        ),
        "selective_scan_fn: B: shape": lambda: mamba_ssm.selective_scan_fn(*scan[:3], rand(4, 3), scan[4]),
        "return_varlen_states": lambda: mamba_ssm.mamba_chunk_scan_combined(
            **ssd, chunk_size=16, return_varlen_states=True
        ),
        "cu_seqlens: it is read for": lambda: mamba_ssm.mamba_chunk_scan_combined(
            **ssd, chunk_size=16, cu_seqlens=torch.tensor([0, 6])
        ),
        "group_size: 7": lambda: mamba_ssm.rmsnorm_fn(x, rand(6), None, group_size=7),
        "num_computed_tokens: vLLM": lambda: vllm.causal_conv1d_fn(
            x[0], weight, None, rand(1, 4, 3), torch.tensor([0, 6]), num_computed_tokens=torch.zeros(1)
        ),
        "head_first": lambda: fla.chunk_gated_delta_rule(*[x[:, None]] * 5, head_first=True),
        "fused_recurrent_gated_delta_rule: gv": lambda: fla.fused_recurrent_gated_delta_rule(*[x[:, None]] * 3, gv=x),
        "num_accepted_tokens": lambda: mamba_ssm.selective_state_update(
            rand(1, 4, 3), rand(1, 4), rand(1, 4), -torch.rand(4, 3), rand(1, 3), rand(1, 3),
            state_batch_indices=torch.zeros(1, dtype=torch.int32), num_accepted_tokens=torch.ones(1),
        ),
    }.items():  # fmt: skip
        with pytest.raises(RefusedArgumentError) as caught:
            call()
        assert word in str(caught.value)


def test_gradients_are_refused_not_lost() -> None:
    x, weight = rand(1, 4, 6), rand(4, 4).requires_grad_()
    with pytest.raises(RefusedArgumentError, match=r"causal_conv1d_fn: weight: .*torch\.no_grad"):
        causal_conv1d.causal_conv1d_fn(x, weight)
    with torch.no_grad():
        causal_conv1d.causal_conv1d_fn(x, weight)
    with pytest.raises(RefusedArgumentError, match="rmsnorm_fn: z"):
        mamba_ssm.rmsnorm_fn(x, rand(6), None, rand(1, 4, 6).requires_grad_())


def test_float64_goes_to_the_reference() -> None:
    case = {k: v.double() for k, v in _ssd(1, 9, torch.float32, torch.device("cpu")).items()}
    y = mamba_ssm.mamba_chunk_scan_combined(**case, chunk_size=4, dt_softplus=True)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y[0], _ssd_exact(case, 0, slice(None))[0], rtol=1e-10, atol=1e-10)
