"""Programmatic dependent launch: a kernel starts while the one before it ends.

On GPUs of compute capability 9.0 and later a kernel may be launched before its predecessor is done, as soon as all
programs of that one have *released* it. It then loads what nobody is writing (weights), and *awaits* the
predecessor before it touches anything else. Without the launch option both are nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel start, if it was launched as a dependent one."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def await_before(DEPENDENT: tl.constexpr):
    """Wait until all that the kernels before wrote is there."""
    if DEPENDENT:
        gdc_wait()


@cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: ``DEPENDENT`` for the kernel, and the launch option that it needs."""
    if device.type != "cuda" or not _capable(device.index or 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
