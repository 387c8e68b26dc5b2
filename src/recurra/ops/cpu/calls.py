"""From tensors to kernels: argument tables, dtypes, states by slot, and threads that share a job's units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.cpu.jit import address as address_of
from recurra.ops.cpu.threads import thread_pool

Job = Callable[[int, int, int], None]
WIDE_ENOUGH = (torch.float32, torch.bfloat16, torch.float16)


def as_float32(tensor: Tensor, name: str) -> Tensor:
    """A float32 tensor itself, a 16-bit one widened.

    Raises:
        ConfigError: any other dtype.
    """
    if tensor.dtype not in WIDE_ENOUGH:
        raise ConfigError(
            "dtype",
            str(tensor.dtype),
            f"the cpu backend computes in float32 and can't take {name} in this dtype.",
            "Use float32, bfloat16 or float16, or backend='reference'.",
        )
    return tensor.detach().float()


def unit_rows(tensor: Tensor, name: str) -> Tensor:
    """As :func:`as_float32`, with everything but the first dimension contiguous; any row stride is kept."""
    tensor = as_float32(tensor, name)
    inner = tensor[0] if tensor.shape[0] else tensor
    return tensor if inner.is_contiguous() else tensor.contiguous()


def row_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def table(*values: int | float) -> Tensor:
    """Arguments of a job: int64 words; a float takes a word as float32 bits in its low half."""
    words = np.zeros(len(values), dtype=np.int64)
    halves = words.view(np.float32)
    for i, value in enumerate(values):
        if isinstance(value, float):
            halves[2 * i] = value
        else:
            words[i] = value
    return torch.from_numpy(words)


@dataclass(frozen=True, slots=True)
class States:
    """States that kernels address as float32 rows by slot; ``commit`` rounds them back when they are copies."""

    rows: Tensor
    slots: Tensor  # int32, rows of ``rows``
    target: Tensor | None  # the narrower tensor that the rows were copied from
    target_slots: Tensor

    def commit(self, cu_seqlens: Tensor) -> None:
        if self.target is None:
            return
        written = cu_seqlens[1:] > cu_seqlens[:-1]
        self.target[self.target_slots[written].long()] = self.rows[written].to(self.target.dtype)


def states_by_slot(state: Tensor, slots: Tensor, setting: str) -> States:
    """Float32 states in place; 16-bit ones widened into a copy that is rounded once, at the end.

    Args:
        setting: the setting that chose the states' dtype, named if it is refused.

    Raises:
        ConfigError: states that are neither float32 nor 16-bit floats.
    """
    if state.dtype not in WIDE_ENOUGH:
        raise ConfigError(
            setting,
            str(state.dtype).removeprefix("torch."),
            "the cpu backend can't keep states in this dtype.",
            'Use "float32", "bfloat16" or "float16".',
        )
    slots = slots.to(torch.int32).contiguous()
    if state.dtype == torch.float32 and state[0].is_contiguous():
        return States(state, slots, None, slots)
    rows = state[slots.long()].float().contiguous()
    return States(rows, torch.arange(slots.shape[0], dtype=torch.int32), state, slots)


def threads_for(units: int) -> int:
    """Threads that share a job: PyTorch's setting for this process, or the caller alone for a single unit."""
    return torch.get_num_threads() if units > 1 else 1


def run(job: Job, arguments: Tensor, threads: int) -> None:
    """Run a job to its end on the calling thread and ``threads - 1`` workers."""
    thread_pool(threads).run(address_of(job), arguments.numpy())
