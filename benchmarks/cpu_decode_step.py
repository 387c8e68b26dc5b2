"""The bare decode step and head on this CPU, beside the roofline of memory.

Random weights at the published 130M shapes. Prints a line a case: milliseconds, tokens/s, and the floor, which
is the bytes of the weights plus twice the states' over the measured read rate with as many threads.

    python benchmarks/cpu_decode_step.py [--model mamba|mamba2] [--dtype float32|bfloat16|float16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from recurra.ops.decode_stack import Mamba1Weights, Mamba2Weights, StackWeights
from recurra.ops.decode_stack.cpu import build_decode_stack
from recurra.ops.linear.cpu import linear

HIDDEN, LAYERS, INNER, W = 768, 24, 1536, 4
VOCABULARY = {"mamba": 50280, "mamba2": 50288}


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns) / columns**0.5).to(dtype)


def mamba1_block(dtype: torch.dtype) -> Mamba1Weights:
    N, rank = 16, 48
    return Mamba1Weights(
        torch.ones(HIDDEN), 1e-5, _matrix(2 * INNER, HIDDEN, dtype), None, torch.randn(INNER, W),
        torch.randn(INNER), _matrix(rank + 2 * N, INNER, dtype), _matrix(INNER, rank, dtype),
        torch.empty(INNER).uniform_(-4, -1), -torch.rand(INNER, N), torch.ones(INNER),
        _matrix(HIDDEN, INNER, dtype), None, None,
    )  # fmt: skip


def mamba2_block(dtype: torch.dtype) -> Mamba2Weights:
    H, P, G, N = 24, 64, 1, 128
    conv = INNER + 2 * G * N
    return Mamba2Weights(
        torch.ones(HIDDEN), 1e-5, _matrix(INNER + conv + H, HIDDEN, dtype), None, torch.randn(conv, W),
        torch.randn(conv), torch.empty(H).uniform_(-4, -1), -torch.rand(H), torch.ones(H), (0.0, float("inf")),
        torch.ones(INNER), 1e-5, INNER, _matrix(HIDDEN, INNER, dtype), None, H, P, G, N,
    )  # fmt: skip


def model(name: str, dtype: torch.dtype) -> StackWeights:
    make = mamba1_block if name == "mamba" else mamba2_block
    return StackWeights(
        _matrix(VOCABULARY[name], HIDDEN, dtype),
        tuple(make(dtype) for _ in range(LAYERS)),
        torch.ones(HIDDEN),
        1e-5,
    )


def states(name: str, slots: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Views of one row a slot, as in the engine's pool."""
    conv, ssm = ((INNER, W - 1), (INNER, 16)) if name == "mamba" else ((INNER + 256, W - 1), (24, 64, 128))
    sizes = [torch.Size(shape).numel() for shape in (conv, ssm)]
    rows = torch.zeros(slots, LAYERS, sum(sizes))
    views = [rows[:, layer].split(sizes, dim=1) for layer in range(LAYERS)]
    return tuple((c.unflatten(1, conv), s.unflatten(1, ssm)) for c, s in views)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of some calls, after two."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times[2:])[repeats // 2]


def read_rate() -> float:
    """Bytes a second of a product with one row and 1.2 GB of weights, the kernel's own way of reading."""
    weight, x = torch.randn(400_000, HIDDEN), torch.randn(1, HIDDEN)
    return weight.numel() * 4 / seconds(lambda: linear(x, weight), 3)


def matrix_bytes(weights: StackWeights) -> int:
    """What a step reads of the weights, head included."""
    tensors = [weights.embedding]
    for block in weights.blocks:
        tensors += [t for name in block.__slots__ if isinstance(t := getattr(block, name), Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def bench(name: str, dtype: torch.dtype, threads: int, rate: float, batches: list[int]) -> None:
    weights = model(name, dtype)
    pool = states(name, max(batches) + 1)
    state_bytes = sum(t[0].numel() * 4 for pair in pool for t in pair)
    step = build_decode_stack(weights, pool, threads)
    for S in batches:
        slots = torch.arange(1, S + 1, dtype=torch.int32)
        ids = torch.randint(0, VOCABULARY[name], (S,))

        def whole(ids: Tensor = ids, slots: Tensor = slots) -> Tensor:
            return linear(step(ids, slots), weights.embedding)

        took = seconds(whole, 15 if S < 8 else 5)
        floor = (matrix_bytes(weights) + 2 * S * state_bytes) / rate
        print(
            f"{name} {str(dtype)[6:]:9} threads {threads} batch {S:3}: {took * 1e3:7.2f} ms "
            f"{S / took:7.1f} tokens/s, floor {floor * 1e3:6.2f} ms, {floor / took:.2f} of it",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="*", default=["mamba", "mamba2"])
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="*", type=int, default=[2, 1])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    options = parser.parse_args()
    for threads in options.threads:
        torch.set_num_threads(threads)
        rate = read_rate()
        print(f"memory reads {rate / 1e9:.1f} GB/s with {threads} threads")
        for name in options.model:
            for dtype in options.dtype:
                bench(name, getattr(torch, dtype), threads, rate, options.batch)


if __name__ == "__main__":
    main()
