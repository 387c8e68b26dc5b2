"""The selective recurrence's CPU backend."""

from __future__ import annotations

from recurra.ops.ssm.cpu_scan import selective_scan_varlen
from recurra.ops.ssm.cpu_ssd import mamba_chunk_scan_varlen
from recurra.ops.ssm.cpu_update import selective_state_update

__all__ = ["mamba_chunk_scan_varlen", "selective_scan_varlen", "selective_state_update"]
