"""mamba_ssm's operators: those of ``ops.triton.*`` and ``ops.selective_scan_interface``."""

from __future__ import annotations

from recurra.ops.compat.norm import RMSNorm, layernorm_fn, rmsnorm_fn
from recurra.ops.compat.parts import chunk_cumsum, ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing
from recurra.ops.compat.ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

__all__ = [
    "RMSNorm",
    "chunk_cumsum",
    "layernorm_fn",
    "mamba_chunk_scan_combined",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_state_update",
    "ssd_bmm",
    "ssd_chunk_scan",
    "ssd_chunk_state",
    "ssd_state_passing",
]
