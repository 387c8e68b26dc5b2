"""The experts on GPUs without Triton: PyTorch's products, an expert after the other. The host waits for the counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    parts = x.new_empty(order.shape[0], x.shape[1])
    for expert, rows in enumerate(torch.split(order, counts)):
        if rows.numel():
            h = activate(F.linear(x[rows // choices], w_in[expert].to(x.dtype)), activation, gated)
            parts[rows] = F.linear(h, w_out[expert].to(x.dtype))
    weighted = parts.view(x.shape[0], choices, x.shape[1]).float() * expert_weights.float()[:, :, None]
    return weighted.sum(1).to(x.dtype)
