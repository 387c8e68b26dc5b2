"""The experts on the CPU: tokens in the order of their experts, one product for each expert that is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.linear.cpu import linear
from recurra.ops.moe.activation import activate


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
    choices = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=w_in.shape[0]).tolist()
    parts = torch.empty(order.shape[0], x.shape[1], dtype=torch.float32)
    for expert, rows in enumerate(torch.split(order, counts)):
        if rows.numel():
            h = activate(linear(x[rows // choices].float(), w_in[expert]), activation, gated)
            parts[rows] = linear(h, w_out[expert])
    weighted = parts.view(x.shape[0], choices, x.shape[1]) * expert_weights.float()[:, :, None]
    return weighted.sum(1).to(x.dtype)
