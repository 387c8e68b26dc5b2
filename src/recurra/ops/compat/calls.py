"""What the wrappers share: the operator for a tensor's device, refusals, packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recurra.device import detect
from recurra.errors import RefusedArgumentError
from recurra.ops.registry import BACKENDS, OPERATORS, choose
from recurra.types import Chunks

#: Kernel chunk where the caller names none.
CHUNK = 64


@cache
def _operator(name: str, device: str, exact: bool) -> Callable[..., Any]:
    row = next(operator for operator in OPERATORS if operator.name == name)
    choice, function = choose(row, detect(device), ("reference",) if exact else BACKENDS)
    assert function is not None, choice
    return function


def operator(name: str, like: Tensor) -> Callable[..., Any]:
    """The operator of a tensor's device; the reference for float64."""
    device = "cpu" if like.device.type == "cpu" else f"cuda:{like.device.index or 0}"
    return _operator(name, device, like.dtype == torch.float64)


def refuse_gradients(function: str, **tensors: Tensor | None) -> None:
    """Refuse inputs whose gradient would be lost.

    Raises:
        RefusedArgumentError: one requires a gradient while gradients are recorded.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RefusedArgumentError(
                function, name, "it requires a gradient, and these operators have none.",
                "Call under torch.no_grad() or torch.inference_mode(), or pass it detached.",
            )  # fmt: skip


def refuse_given(function: str, reason: str, **arguments: Any) -> None:
    """Refuse arguments that aren't None.

    Raises:
        RefusedArgumentError: one is given.
    """
    for name, value in arguments.items():
        if value is not None:
            raise RefusedArgumentError(function, name, reason, "Leave it out.")


def applies_silu(function: str, activation: str | bool | None) -> bool:
    """Whether an activation is silu.

    Raises:
        RefusedArgumentError: it is another one.
    """
    if activation in (None, False):
        return False
    if activation in ("silu", "swish", True):
        return True
    raise RefusedArgumentError(
        function, "activation", f"{activation!r} is not served.", 'Use None, "silu" or "swish".'
    )


def int32(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """(n,) int32, contiguous."""
    if isinstance(values, Tensor):
        return values.to(device, torch.int32).contiguous()
    return torch.tensor(values, dtype=torch.int32, device=device)


def bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return int32([0, *accumulate(lengths)], device)


def chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Each sequence cut from its own first token."""
    seq, start, length, before = [], [], [], [0]
    offset = 0
    for s, tokens in enumerate(lengths):
        for at in range(0, tokens, size):
            seq.append(s)
            start.append(offset + at)
            length.append(min(size, tokens - at))
        offset += tokens
        before.append(len(seq))
    return Chunks(size, *(int32(column, device) for column in (seq, start, length, before)))


def pieces(seq_idx: Tensor) -> tuple[list[int], list[int]]:
    """Rows (B, L) of sequence numbers cut where the number changes: lengths, and the row of each piece."""
    lengths, rows = [], []
    for row, numbers in enumerate(seq_idx.tolist()):
        begin = 0
        for t in range(1, len(numbers) + 1):
            if t == len(numbers) or numbers[t] != numbers[begin]:
                lengths.append(t - begin)
                rows.append(row)
                begin = t
    return lengths, rows


def first_and_last(rows: list[int]) -> tuple[list[int], list[int]]:
    """Of pieces in the order of their rows: the first and the last piece of each row."""
    first = [i for i, row in enumerate(rows) if i == 0 or rows[i - 1] != row]
    last = [i for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1] != row]
    return first, last


def dense(tensor: Tensor) -> Tensor:
    """The tensor with a unit last stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
