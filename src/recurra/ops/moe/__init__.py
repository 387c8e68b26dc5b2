"""Feed-forward experts: each token passes through the few that a router chose for it.

``y[t] = sum_j expert_weights[t, j] * w_out[e] (act(gate) * up)`` with ``e = expert_ids[t, j]`` and gate and up the
first and second half of ``w_in[e] x[t]``; experts without a gate give ``w_out[e] act(w_in[e] x[t])``. Source: Switch
Transformers (Fedus et al., 2021); Mixtral (Jiang et al., 2024).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ExpertMLP(Protocol):
    """Run every token through its experts.

    Args:
        x: (T, D), any row stride; float32, bfloat16, float16 (float64 in the reference).
        w_in: (E, 2 F, D) with gates first where ``gated``, else (E, F, D); w_out: (E, D, F). Dense.
        expert_ids: (T, k) int64, 0 to E - 1.
        expert_weights: (T, k) float32.
        activation: a name of :data:`recurra.ops.moe.activation.BY_NAME`.
        gated: whether experts have a gate.

    Returns:
        (T, D) in x's dtype. A token's result doesn't depend on the others.
    """

    def __call__(
        self,
        x: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        *,
        activation: str,
        gated: bool,
    ) -> Tensor: ...
