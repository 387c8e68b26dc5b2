"""Subnormal numbers count as zero inside jobs, on every thread, and nowhere else."""

from __future__ import annotations

import numpy as np
import torch

from recurra.ops.cpu.jit import address
from recurra.ops.cpu.threads import ThreadPool, finish, wait_done
from recurra.ops.cpu.vectors import get, put, word
from recurra.ops.linear.cpu import linear


def _each_thread_multiplies(args: int, control: int, rank: int) -> None:
    at = word(args, 0)
    put(at + 4 * (rank + 1), get(at) * get(at + 12))
    finish(control)
    if rank == 0:
        wait_done(control, 2)


def test_both_threads_flush_and_the_caller_is_itself_again() -> None:
    values = torch.tensor([1e-20, 7.0, 7.0, 1e-20])
    pool = ThreadPool(2)
    pool.run(address(_each_thread_multiplies), np.array([values.data_ptr()]))
    pool.close()
    assert values[1:3].tolist() == [0.0, 0.0]
    tiny = np.float32(1e-20)
    assert tiny * tiny > 0


def test_products_flush() -> None:
    x, weight = torch.full((1, 1), 1e-20), torch.full((9, 1), 1e-20)
    assert float((x @ weight.T).min()) > 0
    assert torch.equal(linear(x, weight), torch.zeros(1, 9))
    assert float((x @ weight.T).min()) > 0
