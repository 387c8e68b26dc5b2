"""The definition of replay: the formula, a loop over sequences and tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.precision import wide
from recurra.ops.replay import check_ring
from recurra.ops.rounding.reference import load, store
from recurra.ops.ssm.reference import _step_size
from recurra.ring import Ring
from recurra.rounding import NEAREST, Rounding

_NO_LIMIT = (0.0, float("inf"))


def _weights(dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Of inputs with steps dt (E, H): what each counts after all of them (E, H), and what came before them (H,)."""
    later = torch.stack([dt[e + 1 :].sum(0) for e in range(dt.shape[0])])  # no difference of sums
    return torch.exp(later * A) * dt, torch.exp(dt.sum(0) * A)


def _by_head(B: Tensor, heads: int) -> Tensor:
    return B.repeat_interleave(heads // B.shape[1], dim=1)


def _entries(
    ring: Ring, slot: int, start: int, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    places = [(start + e) % ring.x.shape[1] for e in range(count)]
    return ring.x[slot, places].to(dtype), ring.dt[slot, places].to(dtype), ring.B[slot, places].to(dtype)


def _folded(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, A: Tensor) -> Tensor:
    """The state (1, H, P, N) after inputs x (E, H, P), dt (E, H), B (E, G, N)."""
    if x.shape[0] == 0:
        return state
    weights, decay = _weights(dt, A)
    fresh = torch.einsum("eh,ehp,ehn->hpn", weights, x, _by_head(B, x.shape[1]))
    return decay[:, None, None] * state + fresh


def replay_fold(
    ssm_state: Tensor,
    ring: Ring,
    A: Tensor,
    slots: Tensor,
    has_state: Tensor,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> None:
    """See :class:`recurra.ops.replay.ReplayFold`."""
    dtype = wide(ssm_state, A)
    for s, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        if bool(has_state[s]):
            start, count = ring.at[slot, 0].tolist()
            state = load(ssm_state, state_scale, slots[s : s + 1], dtype)
            if count:
                after = _folded(state, *_entries(ring, slot, start, count, dtype), A.to(dtype))
                store(ssm_state, state_scale, slots[s : s + 1], after, rounding)
        ring.at[slot] = 0


def replay_state_update(
    ssm_state: Tensor,
    ring: Ring,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    slots: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    rejected: Tensor | None = None,
    window: int = 1,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.replay.ReplayStateUpdate`."""
    length = check_ring(ring, ssm_state, window)
    dtype = wide(x, ssm_state, A)
    out = torch.zeros_like(x)
    bounds = list(range(slots.shape[0] + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    steps = _step_size(dt, dt_bias, dt_softplus, dt_limit, dtype)
    for s, slot in enumerate(slots.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        new = bounds[s + 1] - bounds[s]
        if slot == 0:
            continue
        assert new <= min(window, length), f"{new} tokens in a step: at most {min(window, length)}"
        start, count = ring.at[slot, 0].tolist()
        count -= 0 if rejected is None else int(rejected[s])
        if count + new > length:
            state = load(ssm_state, state_scale, slots[s : s + 1], dtype)
            state = _folded(state, *_entries(ring, slot, start, count, dtype), A.to(dtype))
            store(ssm_state, state_scale, slots[s : s + 1], state, rounding)
            start, count = (start + count) % ring.x.shape[1], 0
        for e, t in enumerate(range(bounds[s], bounds[s + 1])):
            place = (start + count + e) % ring.x.shape[1]
            ring.x[slot, place], ring.dt[slot, place], ring.B[slot, place] = x[t], steps[t], B[t]
        ring.at[slot] = torch.tensor([start, count + new], dtype=torch.int32, device=ring.at.device)
        if new:
            held = _entries(ring, slot, start, count + new, dtype)
            state = load(ssm_state, state_scale, slots[s : s + 1], dtype)[0]
            out[tokens] = _outputs(state, held, count, A.to(dtype), C[tokens].to(dtype)).to(x.dtype)
    return _finished(out, x, D, z, slots, bounds, dtype)


def _outputs(state: Tensor, held: tuple[Tensor, ...], first: int, A: Tensor, C: Tensor) -> Tensor:
    """C_t . S_t (n, H, P) of the entries from ``first`` on."""
    x, dt, B = held
    heads = x.shape[1]
    Bh, Ch, rows = _by_head(B, heads), _by_head(C, heads), []
    for t in range(C.shape[0]):
        seen = first + t + 1
        weights, decay = _weights(dt[:seen], A)
        scores = torch.einsum("hn,ehn->eh", Ch[t], Bh[:seen]) * weights
        before = torch.einsum("hn,hpn->hp", Ch[t], state) * decay[:, None]
        rows.append(before + torch.einsum("eh,ehp->hp", scores, x[:seen]))
    return torch.stack(rows)


def _finished(
    y: Tensor,
    x: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    slots: Tensor,
    bounds: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Skip and gate, and zeros for padding."""
    real = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for s, slot in enumerate(slots.tolist()):
        real[bounds[s] : bounds[s + 1]] = slot != 0
    wide_y = y.to(dtype)
    if D is not None:
        Dw = D.to(dtype)
        wide_y = wide_y + (Dw if Dw.dim() == 2 else Dw[:, None]) * x.to(dtype)
    if z is not None:
        wide_y = wide_y * F.silu(z.to(dtype))
    return torch.where(real[:, None, None], wide_y, 0.0).to(x.dtype)
