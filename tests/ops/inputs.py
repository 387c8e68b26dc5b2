"""Inputs of the operator tests, how an operator is run on them, and what counts as right.

Every case is drawn in float64 and rounded to the dtypes of a run *before* anything is computed, so that
the float64 answer and the answer under test start from the same numbers. States live in a real
:class:`recurra.cache.pool.StatePool` whose bytes are all NaN, activations are column views of wider
("fused") tensors, and slots are not row numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.cache.spec import mamba1_state, mamba2_state
from recurra.ops.rounding import NEAREST, SCALED, Rounding, stochastic
from recurra.ops.rounding import reference as rounding_reference
from recurra.types import Chunks

Op = Callable[..., Tensor]


# --- packing -------------------------------------------------------------------------------------


def bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Cut each sequence from its own first token."""
    seq, start, length, cu = [], [], [], [0]
    offset = 0
    for s, tokens in enumerate(lengths):
        for at in range(0, tokens, size):
            seq.append(s)
            start.append(offset + at)
            length.append(min(size, tokens - at))
        offset += tokens
        cu.append(len(seq))
    return Chunks(
        size, *(torch.tensor(v, dtype=torch.int32, device=device) for v in (seq, start, length, cu))
    )


def fused(*parts: Tensor) -> tuple[Tensor, ...]:
    """The same values as column views of one wider tensor, as a fused projection yields them."""
    flat = [p.flatten(1) for p in parts]
    pad = flat[0].new_full((flat[0].shape[0], 3), float("nan"))
    wide = torch.cat([pad, *flat, pad], dim=1)
    views, column = [], pad.shape[1]
    for part, columns in zip(parts, flat, strict=True):
        view = wide[:, column : column + columns.shape[1]]
        views.append(view.unflatten(1, part.shape[1:]) if part.dim() > 2 else view)
        column += columns.shape[1]
    return tuple(views)


def slots_for(rows: int, device: torch.device) -> Tensor:
    """Distinct slots in another order than the rows, leaving slot 0 and one more unused."""
    return torch.tensor([rows + 1 - r for r in range(rows)], dtype=torch.int32, device=device)


def poisoned_pool(spec: Any, num_slots: int, device: torch.device, rounding: Rounding = NEAREST) -> StatePool:
    """A pool of two layers (so that slots are far apart) in which every number is NaN."""
    pool = StatePool((spec, spec), num_slots, device, rounding)
    pool.rows.fill_(0xFF)
    return pool


# --- judging -------------------------------------------------------------------------------------


def error(got: Tensor, exact: Tensor) -> float:
    """Relative error of the whole tensor; infinite when there is a NaN where none belongs."""
    difference = (got.double().cpu() - exact.double().cpu()).norm().item()
    return (
        difference / max(exact.double().norm().item(), 1e-300) if difference == difference else float("inf")
    )


def check(got: Tensor, plain: Tensor, exact: Tensor, what: str) -> None:
    """The criterion: at most twice the error of plain PyTorch in the same dtype.

    A plain answer can be luckily exact on few numbers, hence the floor of one rounding of the result.
    """
    assert got.shape == exact.shape, (what, got.shape, exact.shape)
    if exact.numel() == 0:
        return
    allowed = 2 * max(error(plain, exact), torch.finfo(got.dtype).eps / 2)
    seen = error(got, exact)
    assert seen <= allowed, f"{what}: error {seen:.3e}, allowed {allowed:.3e}"


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run: activations, states, and the parameters that are float32 everywhere."""

    act: torch.dtype
    state: torch.dtype
    parameter: torch.dtype = torch.float32
    by_chance: bool = False  # states are rounded stochastically

    def __str__(self) -> str:
        mode = "-stochastic" if self.by_chance else ""
        return f"{self.act}-{self.state}{mode}".replace("torch.", "")

    def rounding(self, device: torch.device | str) -> Rounding:
        """How states are rounded; every run starts from the same seed and step."""
        return stochastic(7, device) if self.by_chance else NEAREST

    def stored(self, state: Tensor) -> Tensor:
        """The numbers that a state in this precision can hold, nearest to those given."""
        if self.state not in SCALED:
            return state.to(self.state)
        stored, scale = rounding_reference.encode(state.float(), self.state, None)
        return stored.float() * scale.float()[..., None]


EXACT = Precision(torch.float64, torch.float64, torch.float64)


@dataclass(frozen=True)
class Case:
    """Fields named in ACT are activations, in STATE states; other tensors are parameters."""

    ACT = ("x", "dt", "B", "C", "z")
    STATE = ("state",)

    def to(self, precision: Precision, device: torch.device | str = "cpu") -> Self:
        """Round every tensor to its dtype of a run."""
        changes: dict[str, Tensor] = {}
        # A scaled state is given its scales where it is stored.
        wide_enough = torch.float32 if precision.state in SCALED else precision.state
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                kind = (
                    precision.act
                    if field.name in self.ACT
                    else wide_enough
                    if field.name in self.STATE
                    else precision.parameter
                )
                changes[field.name] = value.to(device, kind)
        return replace(self, **changes)

    def rounded(self, precision: Precision) -> Self:
        """The float64 case that holds exactly the numbers of a run in ``precision``."""
        names = [f.name for f in fields(self) if f.name in self.STATE]
        held = replace(self, **{name: precision.stored(getattr(self, name)) for name in names})
        return held.to(precision).to(EXACT)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _uniform(low: float, high: float, *shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * (high - low) + low


# --- the convolution -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvCase(Case):
    """Weights x30 as in the reports, so that each tap matters."""

    x: Tensor  # (T, channels)
    weight: Tensor
    bias: Tensor | None
    state: Tensor  # (S, channels, W - 1)
    ACT = ("x", "weight", "bias")

    @classmethod
    def draw(cls, tokens: int, rows: int, channels: int, width: int, bias: bool = True) -> ConvCase:
        return cls(
            _normal(tokens, channels),
            _normal(channels, width) * 30 / width,
            _normal(channels) if bias else None,
            _normal(rows, channels, width - 1),
        )


def _conv_pool(case: ConvCase, precision: Precision, slots: Tensor, has_state: Tensor) -> StatePool:
    channels, width = case.weight.shape
    spec = mamba1_state(channels, 1, width, precision.state, precision.state)
    pool = poisoned_pool(spec, slots.shape[0] + 1, slots.device)
    kept = slots[has_state].long()
    pool.layers[1].conv[kept] = case.state[has_state]
    return pool


def run_conv(
    op: Op,
    case: ConvCase,
    precision: Precision,
    lengths: Sequence[int],
    has_state: Sequence[bool],
    device: torch.device,
    *,
    chunk: int = 16,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Convolve; returns the output and the windows after it, a row a sequence."""
    case = case.to(precision, device)
    slots = slots_for(len(lengths), device)
    flags = torch.tensor(has_state, dtype=torch.bool, device=device)
    pool = _conv_pool(case, precision, slots, flags)
    untouched = pool.rows.clone()
    (x,) = fused(case.x)
    y = op(
        x, case.weight, case.bias, pool.layers[1].conv, bounds(lengths, device), slots, flags,
        chunks_of(lengths, chunk, device), silu=silu,
    )  # fmt: skip
    check_bystanders(pool, untouched, slots)
    return y, pool.layers[1].conv[slots.long()].clone()


def run_conv_update(
    op: Op, case: ConvCase, precision: Precision, device: torch.device, *, silu: bool = True, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """One token of each row, then ``padding`` rows of slot 0 that hold NaN."""
    case = case.to(precision, device)
    rows = case.state.shape[0]
    slots = slots_for(rows, device)
    pool = _conv_pool(case, precision, slots, torch.ones(rows, dtype=torch.bool, device=device))
    untouched = pool.rows.clone()
    (x,) = fused(pad_rows(case.x, padding))
    y = op(x, case.weight, case.bias, pool.layers[1].conv, pad_slots(slots, padding), silu=silu)
    check_bystanders(pool, untouched, slots)
    return y[:rows], pool.layers[1].conv[slots.long()].clone()


def put_states(pool: StatePool, slots: Tensor, state: Tensor) -> None:
    """Store states in the pool's second layer, to the nearest number."""
    layer = pool.layers[1]
    rounding_reference.store(layer.ssm, layer.scale, slots, state, NEAREST)


def get_states(pool: StatePool, slots: Tensor) -> Tensor:
    """The states of the pool's second layer, in their own dtype or as float32 with their scales applied."""
    layer = pool.layers[1]
    dtype = torch.float32 if layer.ssm.dtype in SCALED else layer.ssm.dtype
    return rounding_reference.load(layer.ssm, layer.scale, slots, dtype)


def stored_as(pool: StatePool) -> dict[str, Any]:
    """What an operator is told of how the second layer's states are stored."""
    layer = pool.layers[1]
    return {"state_scale": layer.scale, "rounding": layer.rounding}


def pad_rows(x: Tensor, padding: int) -> Tensor:
    """Append rows of NaN."""
    return torch.cat([x, x.new_full((padding, *x.shape[1:]), float("nan"))])


def pad_slots(slots: Tensor, padding: int) -> Tensor:
    """Append padding marks."""
    return torch.cat([slots, slots.new_zeros(padding)])


def check_bystanders(pool: StatePool, before: Tensor, slots: Tensor) -> None:
    """No byte changed but in the given slots and the scratch slot."""
    others = [s for s in range(1, pool.num_slots + 1) if s not in slots.tolist()]
    assert others, "the test needs a slot that nobody uses"
    assert torch.equal(pool.rows[others], before[others]), "a foreign slot was written"


# --- the recurrence ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScanCase(Case):
    """Mamba-1: A_log near -4 .. 0 and small steps, so that old tokens still weigh at the end."""

    x: Tensor  # (T, channels)
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    state: Tensor  # (S, channels, N)

    @classmethod
    def draw(cls, tokens: int, rows: int, channels: int, state_size: int, optional: bool = True) -> ScanCase:
        return cls(
            _normal(tokens, channels),
            _normal(tokens, channels),
            -torch.exp(_uniform(-4, 0, channels, state_size)),
            _normal(tokens, state_size),
            _normal(tokens, state_size),
            _normal(channels) if optional else None,
            _normal(tokens, channels) if optional else None,
            _uniform(-4, -1, channels) if optional else None,
            _normal(rows, channels, state_size),
        )


@dataclass(frozen=True)
class SSDCase(Case):
    """Mamba-2, with the same care."""

    x: Tensor  # (T, H, P)
    dt: Tensor  # (T, H)
    A: Tensor
    B: Tensor  # (T, G, N)
    C: Tensor
    D: Tensor | None
    z: Tensor | None  # (T, H, P), for the update alone
    dt_bias: Tensor | None
    state: Tensor  # (S, H, P, N)
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @classmethod
    def draw(
        cls,
        tokens: int,
        rows: int,
        heads: int,
        dim: int,
        groups: int,
        state_size: int,
        *,
        optional: bool = True,
        wide_skip: bool = False,
        strong: bool = False,
    ) -> SSDCase:
        """``strong`` draws decays near e^-1 a token, the hard case for sums of dt * A."""
        return cls(
            _normal(tokens, heads, dim),
            _normal(tokens, heads),
            -torch.exp(_uniform(2, 3, heads) if strong else _uniform(-4, 0, heads)),
            _normal(tokens, groups, state_size),
            _normal(tokens, groups, state_size),
            (_normal(heads, dim) if wide_skip else _normal(heads)) if optional else None,
            _normal(tokens, heads, dim) if optional else None,
            _uniform(-4, -1, heads) if optional else None,
            _normal(rows, heads, dim, state_size),
        )


def _ssm_pool(state: Tensor, precision: Precision, slots: Tensor, has_state: Tensor) -> StatePool:
    if state.dim() == 3:
        spec = mamba1_state(state.shape[1], state.shape[2], 2, precision.state, precision.state)
    else:
        heads, dim, size = state.shape[1:]
        spec = mamba2_state(heads, dim, 1, size, 2, precision.state, precision.state)
    pool = poisoned_pool(spec, slots.shape[0] + 1, slots.device, precision.rounding(slots.device))
    put_states(pool, slots[has_state], state[has_state])
    return pool


def run_scan(
    op: Op,
    case: ScanCase | SSDCase,
    precision: Precision,
    lengths: Sequence[int],
    has_state: Sequence[bool],
    device: torch.device,
    *,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences by either operator; returns the output and the states, a row a sequence."""
    case = case.to(precision, device)
    slots = slots_for(len(lengths), device)
    flags = torch.tensor(has_state, dtype=torch.bool, device=device)
    pool = _ssm_pool(case.state, precision, slots, flags)
    untouched = pool.rows.clone()
    where = (pool.layers[1].ssm, bounds(lengths, device), slots, flags, chunks_of(lengths, chunk, device))
    x, dt, B, C = fused(case.x, case.dt, case.B, case.C)
    if isinstance(case, ScanCase):
        z = None if case.z is None else fused(case.z)[0]
        y = op(x, dt, case.A, B, C, case.D, z, case.dt_bias, *where, **stored_as(pool))
    else:
        y = op(x, dt, case.A, B, C, case.D, case.dt_bias, *where, dt_limit=case.dt_limit, **stored_as(pool))
    check_bystanders(pool, untouched, slots)
    return y, get_states(pool, slots)


def run_update(
    op: Op, case: ScanCase | SSDCase, precision: Precision, device: torch.device, *, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """One token of each row (T = S), then ``padding`` rows of slot 0 that hold NaN."""
    case = case.to(precision, device)
    rows = case.state.shape[0]
    slots = slots_for(rows, device)
    pool = _ssm_pool(case.state, precision, slots, torch.ones(rows, dtype=torch.bool, device=device))
    untouched = pool.rows.clone()
    x, dt, B, C = fused(*(pad_rows(t, padding) for t in (case.x, case.dt, case.B, case.C)))
    z = None if case.z is None else fused(pad_rows(case.z, padding))[0]
    limit = {} if isinstance(case, ScanCase) else {"dt_limit": case.dt_limit}
    y = op(
        pool.layers[1].ssm,
        x,
        dt,
        case.A,
        B,
        C,
        case.D,
        z,
        case.dt_bias,
        pad_slots(slots, padding),
        **limit,
        **stored_as(pool),
    )
    check_bystanders(pool, untouched, slots)
    return y[:rows], get_states(pool, slots)


def tokens_of(case: Any, rows: slice | Tensor) -> Any:
    """The case cut down to some of its tokens."""
    names = [f.name for f in fields(case) if f.name in ("x", "dt", "B", "C", "z")]
    return replace(case, **{n: getattr(case, n)[rows] for n in names if getattr(case, n) is not None})
