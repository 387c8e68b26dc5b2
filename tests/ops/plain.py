"""Plain PyTorch in the dtype of a run, and closed forms that share nothing with the references' loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from inputs import ScanCase, SSDCase
from torch import Tensor


def step_sizes(case: ScanCase | SSDCase) -> Tensor:
    """softplus(dt + bias), bounded, in float32 or wider."""
    wide = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    dt = case.dt.to(wide)
    if case.dt_bias is not None:
        dt = dt + case.dt_bias.to(wide)
    dt = F.softplus(dt)
    return dt.clamp(*case.dt_limit) if isinstance(case, SSDCase) else dt


def ssd_matrix_form(
    case: SSDCase, lengths: Sequence[int], has_state: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """``y = (L o C B^T) (dt x)`` plus the carried state's share: products in x's dtype, the rest wide.

    L[t, k] = exp(sum of dt * A over k < j <= t). Returns the output and (S, H, P, N) final states.
    """
    outputs, finals = [], []
    edges = [0, *torch.tensor(list(lengths)).cumsum(0).tolist()]
    per_group = case.x.shape[1] // case.B.shape[1]
    dt_all = step_sizes(case)
    for s, (begin, end) in enumerate(pairwise(edges)):
        rows = slice(begin, end)
        x, dt = case.x[rows], dt_all[rows]
        B, C = (m[rows].repeat_interleave(per_group, 1) for m in (case.B, case.C))
        state = case.state[s].to(dt.dtype)
        if not has_state[s]:
            state = torch.zeros_like(state)
        sums = torch.cumsum(dt * case.A.to(dt.dtype), 0).T  # (H, length)
        between = sums[:, :, None] - sums[:, None, :]
        L = torch.exp(between.tril()).tril()  # (H, t, k)
        scores = torch.einsum("thn,khn->htk", C, B)
        weights = (scores.to(dt.dtype) * L * dt.T[:, None, :]).to(x.dtype)
        y = torch.einsum("htk,khp->thp", weights, x).to(dt.dtype)
        carried = torch.einsum("thn,hpn->thp", C, state.to(x.dtype)).to(dt.dtype)
        y = y + torch.exp(sums).T[:, :, None] * carried
        if case.D is not None:
            D = case.D.to(dt.dtype)
            y = y + (D if D.dim() == 2 else D[:, None]) * x.to(dt.dtype)
        outputs.append(y.to(case.x.dtype))
        last = sums[:, -1:] if end > begin else sums.new_zeros(sums.shape[0], 1)
        left = (torch.exp(last - sums).T * dt)[:, :, None]
        added = torch.einsum("khp,khn->hpn", (left * x.to(dt.dtype)).to(x.dtype), B).to(dt.dtype)
        finals.append(torch.exp(last)[:, :, None] * state + added)
    return torch.cat(outputs), torch.stack(finals).to(case.state.dtype)


def scan_sum_form(case: ScanCase, lengths: Sequence[int], has_state: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Mamba-1 as an explicit double sum: state_t = sum over k <= t of exp(A sum dt) dt_k x_k B_k."""
    outputs, finals = [], []
    edges = [0, *torch.tensor(list(lengths)).cumsum(0).tolist()]
    dt_all = step_sizes(case)
    for s, (begin, end) in enumerate(pairwise(edges)):
        rows = slice(begin, end)
        x, dt, B, C = case.x[rows], dt_all[rows], case.B[rows], case.C[rows]
        state = case.state[s] if has_state[s] else torch.zeros_like(case.state[s])
        sums = dt.cumsum(0)  # (length, channels)
        between = (sums[:, None] - sums[None]).permute(2, 0, 1).tril().permute(1, 2, 0)  # (t, k, channels)
        decay = torch.exp(between[..., None] * case.A)
        decay = decay * torch.ones(len(x), len(x), dtype=x.dtype).tril()[:, :, None, None]
        states = torch.einsum("tkcn,kc,kn->tcn", decay, dt * x, B)
        states = states + torch.exp(sums[..., None] * case.A) * state
        y = torch.einsum("tcn,tn->tc", states, C)
        if case.D is not None:
            y = y + case.D * x
        if case.z is not None:
            y = y * F.silu(case.z[rows])
        outputs.append(y)
        finals.append(states[-1] if len(x) else state)
    return torch.cat(outputs), torch.stack(finals)
