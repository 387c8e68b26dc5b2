"""The gated delta rule on GPUs."""

from __future__ import annotations

from recurra.ops.delta.triton_chunk import gated_delta_rule_varlen
from recurra.ops.delta.triton_update import gated_delta_rule_update

__all__ = ["gated_delta_rule_update", "gated_delta_rule_varlen"]
