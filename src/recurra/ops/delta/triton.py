"""The gated delta rule on GPUs."""

from __future__ import annotations

from torch import Tensor

from recurra.ops.delta.triton_chunk import gated_delta_rule_varlen as _by_channel
from recurra.ops.delta.triton_update import gated_delta_rule_update
from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import Chunks

__all__ = ["gated_delta_rule_update", "gated_delta_rule_varlen"]


def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleVarlen`.

    One decay a head is spread over the channels: a form of its own failed its tests on an H200 with
    Triton 3.6 where the form by channel passed, and is gone (docs/lab-notes/delta.md).
    """
    if g.dim() == 2:
        g = g[:, :, None].expand(*g.shape, k.shape[2])
    return _by_channel(
        q, k, v, g, beta, state, cu_seqlens, slots, has_state, chunks, scale=scale, qk_l2norm=qk_l2norm,
        state_scale=state_scale, rounding=rounding,
    )  # fmt: skip
