"""The gated delta rule's CPU backend."""

from __future__ import annotations

from recurra.ops.delta.cpu_chunk import gated_delta_rule_varlen
from recurra.ops.delta.cpu_update import gated_delta_rule_update

__all__ = ["gated_delta_rule_update", "gated_delta_rule_varlen"]
