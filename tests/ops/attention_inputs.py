"""Inputs of the short convolution, of lightning attention and of the delta rules: see :mod:`inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import torch
from inputs import (
    Case,
    Op,
    Precision,
    bounds,
    check_bystanders,
    chunks_of,
    fused,
    get_states,
    pad_rows,
    pad_slots,
    poisoned_pool,
    put_states,
    slots_for,
    stored_as,
)
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.cache.spec import delta_state, lightning_state, short_conv_state


@dataclass(frozen=True)
class PackedCase(Case):
    """A case whose fields named in TOKENS have a row a token."""

    TOKENS = ()

    def tokens(self, rows: slice | Tensor, **changes: Any) -> Self:
        """The case cut down to some of its tokens."""
        names = [f.name for f in fields(self) if f.name in self.TOKENS]
        return replace(self, **{n: getattr(self, n)[rows] for n in names}, **changes)

    def padded(self, rows: int) -> Self:
        """Rows of NaN after the tokens, and everything as column views of one tensor."""
        names = [f.name for f in fields(self) if f.name in self.TOKENS]
        act = [n for n in names if n in self.ACT]
        views = dict(zip(act, fused(*(pad_rows(getattr(self, n), rows) for n in act)), strict=True))
        rest = {n: pad_rows(getattr(self, n), rows) for n in names if n not in act}
        return replace(self, **views, **rest)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _uniform(low: float, high: float, *shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * (high - low) + low


@dataclass(frozen=True)
class ShortConvCase(PackedCase):
    """Weights x30, so that each tap matters."""

    x: Tensor  # (T, channels)
    B: Tensor
    C: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor  # (S, channels, W - 1)
    ACT = ("x", "B", "C", "weight", "bias")
    TOKENS = ("x", "B", "C")

    @classmethod
    def draw(cls, tokens: int, rows: int, channels: int, width: int, bias: bool = True) -> ShortConvCase:
        return cls(
            _normal(tokens, channels),
            _normal(tokens, channels),
            _normal(tokens, channels),
            _normal(channels, width) * 30 / width,
            _normal(channels) if bias else None,
            _normal(rows, channels, width - 1),
        )

    def pool(self, precision: Precision, rows: int) -> StatePool:
        channels, width = self.weight.shape
        return poisoned_pool(short_conv_state(channels, width, precision.state), rows, self.x.device)

    def call(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(self.x, self.B, self.C, self.weight, self.bias, state, *where)

    update = call


@dataclass(frozen=True)
class LightningCase(PackedCase):
    """Decays as the models have them, e^-slope with slopes from near nothing to one half, and stronger."""

    q: Tensor  # (T, H, K)
    k: Tensor
    v: Tensor  # (T, H, V)
    log_decay: Tensor  # (H,)
    state: Tensor  # (S, H, K, V)
    scale: float = 1.0
    ACT = ("q", "k", "v")
    TOKENS = ("q", "k", "v")

    @classmethod
    def draw(
        cls, tokens: int, rows: int, heads: int, key: int, value: int, strongest: float = 0.7
    ) -> LightningCase:
        return cls(
            _normal(tokens, heads, key),
            _normal(tokens, heads, key),
            _normal(tokens, heads, value),
            -torch.logspace(-3, 0, heads, dtype=torch.float64) * strongest,
            _normal(rows, heads, key, value),
            key**-0.5,
        )

    def pool(self, precision: Precision, rows: int) -> StatePool:
        heads, key, value = self.state.shape[1:]
        spec = lightning_state(heads, key, value, precision.state)
        return poisoned_pool(spec, rows, self.q.device, precision.rounding(self.q.device))

    def call(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(self.q, self.k, self.v, self.log_decay, state, *where, scale=self.scale)

    def update(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(state, self.q, self.k, self.v, self.log_decay, *where, scale=self.scale)


@dataclass(frozen=True)
class DeltaCase(PackedCase):
    """Gates of a gated delta net (T, Hv) or of Kimi delta attention (T, Hv, K)."""

    q: Tensor  # (T, Hk, K)
    k: Tensor
    v: Tensor  # (T, Hv, V)
    g: Tensor
    beta: Tensor  # (T, Hv)
    state: Tensor  # (S, Hv, K, V)
    norm: bool = True
    ACT = ("q", "k", "v")
    TOKENS = ("q", "k", "v", "g", "beta")

    @classmethod
    def draw(
        cls,
        tokens: int,
        rows: int,
        key_heads: int,
        value_heads: int,
        key: int,
        value: int,
        *,
        by_channel: bool = False,
        lowest: float = -0.2,
    ) -> DeltaCase:
        gates = (tokens, value_heads, key) if by_channel else (tokens, value_heads)
        return cls(
            _normal(tokens, key_heads, key),
            _normal(tokens, key_heads, key),
            _normal(tokens, value_heads, value),
            _uniform(lowest, 0, *gates),
            _uniform(0.2, 1, tokens, value_heads),
            _normal(rows, value_heads, key, value),
        )

    def pool(self, precision: Precision, rows: int) -> StatePool:
        heads, key, value = self.state.shape[1:]
        spec = delta_state(1, heads, key, value, 4, precision.state, precision.state)
        return poisoned_pool(spec, rows, self.q.device, precision.rounding(self.q.device))

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.q.shape[2] ** -0.5, "qk_l2norm": self.norm}

    def call(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(self.q, self.k, self.v, self.g, self.beta, state, *where, **self.options)

    def update(self, op: Op, state: Tensor, where: tuple[Any, ...]) -> Tensor:
        return op(state, self.q, self.k, self.v, self.g, self.beta, *where, **self.options)


AnyCase = ShortConvCase | LightningCase | DeltaCase


def _put(pool: StatePool, case: AnyCase, slots: Tensor, state: Tensor) -> None:
    if isinstance(case, ShortConvCase):
        pool.layers[1].conv[slots.long()] = state
    else:
        put_states(pool, slots, state)


def _get(pool: StatePool, case: AnyCase, slots: Tensor) -> Tensor:
    if isinstance(case, ShortConvCase):
        return pool.layers[1].conv[slots.long()].clone()
    return get_states(pool, slots)


def _bound(op: Op, pool: StatePool, case: AnyCase) -> tuple[Op, Tensor]:
    """The operator, told how states are stored, and the states."""
    layer = pool.layers[1]
    if isinstance(case, ShortConvCase):
        return op, layer.conv
    return partial(op, **stored_as(pool)), layer.ssm


def run_packed(
    op: Op,
    case: AnyCase,
    precision: Precision,
    lengths: Sequence[int],
    has_state: Sequence[bool],
    device: torch.device,
    *,
    chunk: int = 16,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run on packed sequences; returns the output and the states after it, a row a sequence."""
    case = case.to(precision, device).padded(0)
    slots = slots_for(len(lengths), device) if slots is None else slots
    flags = torch.tensor(has_state, dtype=torch.bool, device=device)
    pool = case.pool(precision, len(lengths) + 1)
    _put(pool, case, slots[flags], case.state[flags])
    op, states = _bound(op, pool, case)
    before = pool.rows.clone()
    where = (bounds(lengths, device), slots, flags, chunks_of(lengths, chunk, device))
    y = case.call(op, states, where)
    check_bystanders(pool, before, slots)
    return y, _get(pool, case, slots)


def run_step(
    op: Op, case: AnyCase, precision: Precision, device: torch.device, *, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """One token of each row (T = S), then ``padding`` rows of slot 0 that hold NaN."""
    case = case.to(precision, device)
    rows = case.state.shape[0]
    slots = slots_for(rows, device)
    pool = case.pool(precision, rows + 1)
    _put(pool, case, slots, case.state)
    op, states = _bound(op, pool, case)
    before = pool.rows.clone()
    if isinstance(case, ShortConvCase):
        y = case.padded(padding).call(op, states, (pad_slots(slots, padding),))
    else:
        y = case.padded(padding).update(op, states, (pad_slots(slots, padding),))
    check_bystanders(pool, before, slots)
    return y[:rows], _get(pool, case, slots)


def lightning_matrix_form(
    case: LightningCase, lengths: Sequence[int], has_state: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """``o = scale * (L o q k^T) v`` plus the carried state's share: products in q's dtype, the rest wide."""
    wide = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    outputs, finals, begin = [], [], 0
    for s, length in enumerate(lengths):
        q, k, v = (t[begin : begin + length] for t in (case.q, case.k, case.v))
        begin += length
        state = case.state[s].to(wide) if has_state[s] else torch.zeros_like(case.state[s], dtype=wide)
        rate = case.log_decay.to(wide)[:, None]
        at = torch.arange(1, length + 1, dtype=wide, device=q.device)
        between = torch.exp(rate[:, :, None] * (at[:, None] - at[None]).clamp(min=0)).tril()
        weights = (torch.einsum("thk,jhk->htj", q, k).to(wide) * between).to(q.dtype)
        y = torch.einsum("htj,jhv->thv", weights, v).to(wide)
        carried = torch.einsum("thk,hkv->thv", q, state.to(q.dtype)).to(wide)
        outputs.append((case.scale * (y + torch.exp(rate * at).T[:, :, None] * carried)).to(v.dtype))
        left = torch.exp(rate * (length - at)).T[:, :, None]
        added = torch.einsum("thk,thv->hkv", (left * k.to(wide)).to(k.dtype), v).to(wide)
        finals.append(torch.exp(rate * length)[:, :, None] * state + added)
    return torch.cat(outputs), torch.stack(finals).to(case.state.dtype)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_matrix_form(
    case: DeltaCase, lengths: Sequence[int], has_state: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """A whole sequence as one triangular system: products in q's dtype, decays and solution wide.

    The corrections U solve (I + M) U = beta (V - (exp(G) K) S); then O = scale ((exp(G) Q) S + A U).
    """
    wide = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    act = case.q.dtype
    outputs, finals, begin = [], [], 0
    groups = case.v.shape[1] // case.q.shape[1]
    for s, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        begin += length
        q, k = (t[rows].to(wide).repeat_interleave(groups, 1) for t in (case.q, case.k))
        if case.norm:
            q, k = _unit(q).to(act).to(wide), _unit(k).to(act).to(wide)
        v, beta = case.v[rows].to(wide), case.beta[rows].to(wide).T[..., None]
        state = case.state[s].to(wide) if has_state[s] else torch.zeros_like(case.state[s], dtype=wide)
        g = case.g[rows].to(torch.float64)
        sums = (g if g.dim() == 3 else g[..., None]).cumsum(0).transpose(0, 1)  # (H, t, K or 1)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        between = torch.exp((sums[:, :, None] - sums[:, None]).clamp(max=0)).to(wide)  # (H, t, j, K or 1)
        enter = torch.exp(sums).to(wide)
        low = [t.to(act) for t in (q * enter, k * enter, state)]
        M = (
            beta * torch.einsum("htk,htjk,hjk->htj", k, between.expand(*between.shape[:3], k.shape[2]), k)
        ).tril(-1)
        A = torch.einsum("htk,htjk,hjk->htj", q, between.expand(*between.shape[:3], k.shape[2]), k).tril()
        wanted = beta * (v - (low[1] @ low[2]).to(wide))
        U = torch.linalg.solve_triangular(M, wanted, upper=False, unitriangular=True)
        y = case.options["scale"] * ((low[0] @ low[2]).to(wide) + (A.to(act) @ U.to(act)).to(wide))
        outputs.append(y.transpose(0, 1).to(case.v.dtype))
        if length:
            last = sums[:, -1:]
            left = (k * torch.exp(last - sums).to(wide)).to(act)
            state = torch.exp(last).to(wide).mT * state + (left.mT @ U.to(act)).to(wide)
        finals.append(state)
    return torch.cat(outputs), torch.stack(finals).to(case.state.dtype)
