"""Threads that share one compiled job.

A job is a compiled function ``job(arguments, control, rank)`` that every thread runs from beginning to
end. Its work is cut into phases of numbered chunks: chunks are claimed one by one from a counter, and a
phase is over when its chunks are *done*, whoever did them. No phase waits for a thread as such, so a
thread that the machine keeps busy elsewhere, or that wakes late, delays at most the chunk it holds.

Waiting means a short spin and then sleep on the counter itself: a core that sleeps at once is free for
the thread that holds the last chunk. The threads never touch Python while they work or wait.

Every thread takes subnormal numbers as zero while it is in a job (see ``subnormals``); the caller's mode is
what it was when the job is over.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import cache

import numpy as np

from recurra.ops.cpu.atomics import call_job, fetch_add, pause, peek, poke, sleep_while, wake
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.subnormals import flush_subnormals, restore_mode

# Words of the control block, each on a cache line pair of its own.
_LINE = 128
EPOCH, OPEN, ACTIVE, NEXT, DONE, STOP, SLEEPERS, IDLE, JOB_ADDRESS, ARGUMENTS, SPINS = (
    i * _LINE for i in range(11)
)
_BYTES = 12 * _LINE

_BUSY_SPIN_US = 20  # before sleeping for the last chunk of a phase
_IDLE_SPIN_FACTOR = 5  # times longer between two jobs: the engine's next call is near


@kernel
def _wait_at_least(word: int, sleepers: int, target: int, spins: int) -> None:
    """Return once the counter at ``word`` has reached ``target``."""
    left = spins
    seen = peek(word)
    while seen < target:
        if left > 0:
            left -= 1
            pause()
        else:
            fetch_add(sleepers, 1)
            seen = peek(word)
            if seen < target:
                sleep_while(word, seen)
            fetch_add(sleepers, -1)
        seen = peek(word)


@kernel
def claim(control: int) -> int:
    """Take the next chunk of the job, counted over all its phases."""
    ticket: int = fetch_add(control + NEXT, 1)
    return ticket


@kernel
def finish(control: int) -> int:
    """Report one chunk done and take the next."""
    fetch_add(control + DONE, 1)
    if peek(control + SLEEPERS) > 0:
        wake(control + DONE)
    ticket: int = fetch_add(control + NEXT, 1)
    return ticket


@kernel
def wait_done(control: int, chunks: int) -> None:
    """Wait until the first ``chunks`` chunks of the job are done."""
    if peek(control + DONE) < chunks:
        _wait_at_least(control + DONE, control + SLEEPERS, chunks, peek(control + SPINS))


@kernel
def _enter(control: int, job: int, arguments: int, rank: int) -> None:
    mode = flush_subnormals()
    call_job(job, arguments, control, rank)
    restore_mode(mode)


@kernel
def _run(control: int, job: int, arguments: int) -> None:
    poke(control + JOB_ADDRESS, job)
    poke(control + ARGUMENTS, arguments)
    poke(control + NEXT, 0)
    poke(control + DONE, 0)
    poke(control + OPEN, 1)
    fetch_add(control + EPOCH, 1)
    if peek(control + IDLE) > 0:
        wake(control + EPOCH)
    _enter(control, job, arguments, 0)
    poke(control + OPEN, 0)
    # Workers still inside have nothing left to do; they leave, and then the arguments may die.
    left = peek(control + SPINS)
    while peek(control + ACTIVE) != 0:
        if left > 0:
            left -= 1
            pause()
        else:
            _wait_until_left(control)


@kernel
def _wait_until_left(control: int) -> None:
    fetch_add(control + SLEEPERS, 1)
    inside = peek(control + ACTIVE)
    if inside != 0:
        sleep_while(control + ACTIVE, inside)
    fetch_add(control + SLEEPERS, -1)


@kernel
def _serve(control: int, rank: int) -> None:
    """A worker's life: wait for a job, help with it, until stopped."""
    seen = 0
    while True:
        _wait_at_least(control + EPOCH, control + IDLE, seen + 1, peek(control + SPINS) * _IDLE_SPIN_FACTOR)
        seen = peek(control + EPOCH)
        if peek(control + STOP) != 0:
            return
        fetch_add(control + ACTIVE, 1)
        if peek(control + OPEN) != 0:
            _enter(control, peek(control + JOB_ADDRESS), peek(control + ARGUMENTS), rank)
        fetch_add(control + ACTIVE, -1)
        if peek(control + SLEEPERS) > 0:
            wake(control + ACTIVE)


@kernel
def _stop(control: int) -> None:
    poke(control + STOP, 1)
    fetch_add(control + EPOCH, 1)
    wake(control + EPOCH)


@kernel
def _pauses(count: int) -> None:
    for _ in range(count):
        pause()


def _spins_per_us() -> float:
    _pauses(1)
    begin = time.perf_counter()
    _pauses(2000)
    return 2000 / max((time.perf_counter() - begin) * 1e6, 1.0)


def _control_block(spins: int) -> np.ndarray:
    block = np.zeros(_BYTES // 8 + _LINE // 8, dtype=np.int64)
    skip = (-block.ctypes.data % _LINE) // 8
    aligned = block[skip : skip + _BYTES // 8]
    aligned[SPINS // 8] = spins
    return aligned


def _close(control: np.ndarray, workers: list[threading.Thread]) -> None:
    _stop(control.ctypes.data)
    for worker in workers:
        worker.join()


class ThreadPool:
    """``num_threads - 1`` workers and the caller.

    Args:
        num_threads: threads that share a job, the calling one included; at least 1.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1, num_threads
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._control = _control_block(max(1, int(_BUSY_SPIN_US * _spins_per_us())))
        workers = [
            threading.Thread(
                target=_serve, args=(self._control.ctypes.data, rank), name=f"recurra-cpu-{rank}", daemon=True
            )
            for rank in range(1, num_threads)
        ]
        for worker in workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _close, self._control, workers)

    def run(self, job: int, arguments: np.ndarray) -> None:
        """Run the job at address ``job`` to its end. One job at a time; callers queue up."""
        with self._lock:
            _run(self._control.ctypes.data, job, arguments.ctypes.data)

    def close(self) -> None:
        """End the workers; the pool must not be used again."""
        self._finalizer()


@cache
def thread_pool(num_threads: int) -> ThreadPool:
    """The process's pool of that size: operators with the same setting share their threads."""
    return ThreadPool(num_threads)
