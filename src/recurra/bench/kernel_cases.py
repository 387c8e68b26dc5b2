"""What ``recurra bench kernels`` runs: an operator's arguments at one shape, and the least work it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recurra.types import Chunks

_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape.

    Attributes:
        operator: its name in the operator table.
        shape: for people.
        arguments, options: of the call.
        nbytes: least bytes to read and write.
        operations: least floating-point operations.
        products: the operations are matrix products, so the matrix rate bounds them.
    """

    operator: str
    shape: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    nbytes: int
    operations: int
    products: bool = False

    def copied(self, convert: Callable[[Tensor], Tensor]) -> Case:
        """The same call on tensors of its own, which it may write to."""
        arguments = tuple(convert(a) if isinstance(a, Tensor) else a for a in self.arguments)
        return Case(
            self.operator, self.shape, arguments, self.options, self.nbytes, self.operations, self.products
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences of a decode step, tokens of a prompt, and the layer: heads, head dim, state columns, groups."""

    sequences: int
    tokens: int
    heads: int
    dim: int
    state: int
    groups: int


SMALL = Sizes(8, 512, 16, 64, 64, 1)
LARGE = Sizes(512, 8192, 128, 64, 128, 8)


def make_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype, chunk: int) -> Iterator[Case]:
    """The Mamba-2 layer's operators: one decode step and one prompt. States are float32."""
    draw = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(dtype)

    S, T, H, P, N, G = (
        sizes.sequences, sizes.tokens, sizes.heads, sizes.dim, sizes.state, sizes.groups,
    )  # fmt: skip
    size, channels = dtype.itemsize, H * P + 2 * G * N
    A = -torch.rand(H, generator=draw, device=device) - 0.02
    bias = torch.rand(H, generator=draw, device=device) - 4
    D, weight, conv_bias = randn(H, dtype=torch.float32), randn(channels, _WIDTH), randn(channels)
    slots = torch.arange(1, S + 1, device=device, dtype=torch.int32)
    window = randn(S + 1, channels, _WIDTH - 1)
    yield Case(
        "causal_conv1d_update", f"S={S} channels={channels} W={_WIDTH}",
        (randn(S, channels), weight, conv_bias, window, slots), {"silu": True},
        2 * S * channels * _WIDTH * size, 2 * _WIDTH * S * channels,
    )  # fmt: skip
    layer = f"H={H} P={P} N={N} G={G}"
    yield Case(
        "selective_state_update", f"S={S} {layer}",
        (randn(S + 1, H, P, N, dtype=torch.float32), randn(S, H, P), randn(S, H), A, randn(S, G, N),
         randn(S, G, N), D, randn(S, H, P), bias, slots), {},
        S * (8 * H * P * N + size * (3 * H * P + H + 2 * G * N)), 5 * S * H * P * N,
    )  # fmt: skip
    one, none = slots[:1], torch.zeros(1, dtype=torch.bool, device=device)
    cu, chunks = _one_sequence(T, chunk, device)
    yield Case(
        "causal_conv1d_varlen", f"T={T} channels={channels} W={_WIDTH}",
        (randn(T, channels), weight, conv_bias, window[:2], cu, one, none, chunks), {"silu": True},
        2 * T * channels * size, 2 * _WIDTH * T * channels,
    )  # fmt: skip
    yield Case(
        "mamba_chunk_scan_varlen", f"T={T} {layer}",
        (randn(T, H, P), randn(T, H), A, randn(T, G, N), randn(T, G, N), D, bias,
         torch.zeros(2, H, P, N, device=device), cu, one, none, chunks), {},
        T * size * (2 * H * P + H + 2 * G * N) + 4 * H * P * N, T * H * (4 * P * N + chunk * P), True,
    )  # fmt: skip
    wide = H * P
    yield Case(
        "rms_norm_gated", f"T={T} channels={wide} group={wide // G}",
        (randn(T, wide), randn(T, wide), randn(wide), 1e-5, wide // G), {}, 3 * T * wide * size, 10 * T * wide,
    )  # fmt: skip


def _one_sequence(tokens: int, size: int, device: torch.device) -> tuple[Tensor, Chunks]:
    start = torch.arange(0, tokens, size, dtype=torch.int32, device=device)
    edges = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    count = torch.tensor([0, len(start)], dtype=torch.int32, device=device)
    length = (tokens - start).clamp(max=size).int()
    return edges, Chunks(size, torch.zeros_like(start), start, length, count)
