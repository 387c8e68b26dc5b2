"""The definition of the experts, one after the other. Float32, or float64 if given it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.moe.activation import activate
from recurra.ops.precision import wide


def expert_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    activation: str,
    gated: bool,
) -> Tensor:
    """See :class:`recurra.ops.moe.ExpertMLP`."""
    dtype = wide(x, w_in)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        h = activate(x[token].to(dtype) @ w_in[expert].to(dtype).T, activation, gated)
        y = h @ w_out[expert].to(dtype).T
        out.index_add_(0, token, y * expert_weights[token, choice, None].to(dtype))
    return out.to(x.dtype)
