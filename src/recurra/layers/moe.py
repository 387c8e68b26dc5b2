"""Mixture of experts: a router chooses a few feed-forward experts for each token.

Sources: Switch Transformers (Fedus et al., 2021); DeepSeek-V3 (2024) for sigmoid scores, groups and the bias that
takes part in the choice alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes, optional, parameter
from recurra.layers.linear import Linear
from recurra.ops import Ops


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become a choice.

    Attributes:
        top_k: experts of a token.
        score: "softmax" over all experts, "sigmoid" of each, or "softmax_chosen": over those chosen alone.
        renormalise: the chosen weights are divided by their sum plus ``eps``.
        scale: of the weights, at the end.
        groups: experts come in so many equal groups, of which the ``groups_kept`` best can be chosen from: those
            whose two best scores have the largest sum.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    renormalise: bool = False
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits: (T, E), float32 or wider.
        bias: (E,), added to the scores for the choice, not to the weights.

    Returns:
        (T, top_k) int64 expert ids, and weights of the logits' dtype.
    """
    if routing.score == "softmax_chosen":
        values, ids = logits.topk(routing.top_k, dim=-1)
        return ids, values.softmax(-1) * routing.scale
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ids = _allowed(scores if bias is None else scores + bias, routing).topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    return ids, weights * routing.scale


def _allowed(scores: Tensor, routing: Routing) -> Tensor:
    """The scores with those of groups that aren't kept out of reach."""
    if routing.groups == 1:
        return scores
    grouped = scores.unflatten(-1, (routing.groups, -1))  # type: ignore[no-untyped-call]
    best = (
        grouped.topk(min(2, grouped.shape[-1]), dim=-1)
        .values.sum(-1)
        .topk(routing.groups_kept, dim=-1)
        .indices
    )
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    return torch.where(kept[..., None], grouped, -torch.inf).flatten(1)  # a bias may make scores negative


@dataclass(frozen=True, slots=True)
class MoESizes:
    """Numbers of one mixture.

    Attributes:
        hidden: width of input and output.
        inner: width of an expert between its products.
        num_experts: E.
        routing: how they are chosen.
        activation: between an expert's products; ``gated``: whether a gate goes through it.
        has_bias: the router has a bias for the choice.
        shared_gated: a token's own sigmoid scales what the shared expert gives.
    """

    hidden: int
    inner: int
    num_experts: int
    routing: Routing
    activation: str = "silu"
    gated: bool = True
    has_bias: bool = False
    shared_gated: bool = False


class MoE(nn.Module):
    """Routed experts, and perhaps one that every token passes: (T, hidden) to the same.

    Parameters: router (E, hidden) and router_bias (E,) in float32, w_in (E, inner or 2 inner, hidden) and w_out
    (E, hidden, inner) in the weights' dtype.

    Args:
        shared: the expert of all tokens, or None.
    """

    def __init__(
        self,
        sizes: MoESizes,
        *,
        shared: nn.Module | None = None,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sizes, self.shared, self._expert_mlp = sizes, shared, ops.expert_mlp
        experts, hidden, inner, wide = sizes.num_experts, sizes.hidden, sizes.inner, dtypes.recurrence
        self.router = parameter(experts, hidden, dtype=wide, device=device)
        self.router_bias = optional(sizes.has_bias, experts, dtype=wide, device=device)
        rows = inner * (2 if sizes.gated else 1)
        self.w_in = parameter(experts, rows, hidden, dtype=dtypes.weight, device=device)
        self.w_out = parameter(experts, hidden, inner, dtype=dtypes.weight, device=device)
        self.shared_gate = (
            Linear(hidden, 1, bias=False, ops=ops, dtypes=dtypes, device=device)
            if sizes.shared_gated
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        ids, weights = route(F.linear(x.to(self.router.dtype), self.router), sizes.routing, self.router_bias)
        y = self._expert_mlp(
            x, self.w_in, self.w_out, ids, weights, activation=sizes.activation, gated=sizes.gated
        )
        if self.shared is None:
            return y
        shared: Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared
