"""Arithmetic over rows of logits: scores, thresholds, draws. Tensors in, tensors out.

R rows, V vocabulary. A row's result depends on that row alone, so that a request's text doesn't depend
on what else is in the batch. On the CPU the work goes to :mod:`recurra.engine.rows_cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recurra.engine import rows_cpu
from recurra.engine.transfer import to_device
from recurra.types import Logprob, PositionLogprobs

#: Token id to its text; None where there is no tokenizer.
Texts = Callable[[int], str | None]

#: Elements of the largest intermediate (float64) that a call makes, so that many rows don't explode.
MAX_ELEMENTS = 1 << 24


def rows_at_once(vocab_size: int) -> int:
    """Rows whose intermediates stay within ``MAX_ELEMENTS``."""
    return max(1, MAX_ELEMENTS // vocab_size)


def argmax(x: Tensor) -> Tensor:
    """(R,) int64, the first largest entry of each row of x (R, V)."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.asarray(x.numpy().argmax(-1)))
    return x.argmax(-1)


@dataclass(frozen=True, slots=True)
class Filters:
    """How rows are drawn, one entry a row.

    Attributes:
        temperature: (R,) float32, above 0.
        top_k: (R,) int64, 1 to V; V keeps all.
        top_p: (R,) float64; the likeliest tokens whose probabilities first reach it stay.
        log_min_p: (R,) float32; tokens whose log-probability is that far below the likeliest's go.
        any_cut: some row uses top_k or top_p.
        any_floor: some row uses min_p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    any_cut: bool
    any_floor: bool


Choose = Callable[[Tensor, Tensor, Filters, Tensor], Tensor]


def choose(logits: Tensor, best: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """Draw a token of each row: temperature, then min_p, top_k and top_p, then the draw.

    Filters keep tokens by value, not by place: tokens that tie with the last one kept stay too.

    Args:
        logits: (R, V) float32.
        best: (R,) float32, the largest of each row.
        filters: for these rows.
        uniform: (R,) float64 in [0, 1), on the host.

    Returns:
        (R,) int64.
    """
    step = rows_at_once(logits.shape[1])
    placed = to_device(uniform.numpy(), logits.device)
    parts = [slice(start, start + step) for start in range(0, logits.shape[0], step)]
    return torch.cat([draw(_filtered(logits, best, filters, part), placed[part]) for part in parts])


def chooser(vocab_size: int, device: torch.device) -> Choose:
    """The form of :func:`choose` for a device."""
    if device.type != "cpu":
        return choose
    drawer = rows_cpu.RowDrawer(vocab_size)

    def choose_on_cpu(logits: Tensor, best: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        columns = (filters.temperature, filters.top_k, filters.top_p, filters.log_min_p)
        numbers = tuple(column.numpy() for column in columns)
        return torch.from_numpy(drawer.choose(logits.numpy(), best.numpy(), numbers, uniform.numpy()))

    return choose_on_cpu


def _filtered(logits: Tensor, best: Tensor, filters: Filters, part: slice) -> Tensor:
    """Rows of ``part`` with the largest at 0 and what the filters exclude at -inf."""
    x = (logits[part] - best[part, None]) / filters.temperature[part, None]
    if filters.any_floor:
        x = x.masked_fill(x < filters.log_min_p[part, None], float("-inf"))
    if filters.any_cut:
        x = x.masked_fill(x < threshold(x, filters.top_k[part], filters.top_p[part]), float("-inf"))
    return x


def threshold(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Smallest entry that top-k and then top-p keep.

    Args:
        x: (R, V) float32 logits, largest 0; entries of -inf are out already.
        top_k, top_p: as in :class:`Filters`.

    Returns:
        (R, 1) float32.
    """
    ordered = torch.sort(x, dim=-1, descending=True).values
    kth = ordered.gather(1, (top_k - 1)[:, None])
    mass = torch.where(ordered >= kth, ordered.exp(), 0.0).cumsum(-1, dtype=torch.float64)
    reached = mass >= top_p[:, None] * mass[:, -1:]
    nucleus = ordered.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))
    # top_p 1 keeps every entry, also those too small to change the running sum.
    return torch.where(top_p[:, None] < 1.0, nucleus, kth)


def draw(x: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token of each row by inverting its cumulative distribution.

    Args:
        x: (R, V) float32 logits, largest 0; -inf is never drawn.
        uniform: (R,) float64 in [0, 1).

    Returns:
        (R,) int64. Rows that hold NaN give some token in range.
    """
    mass = x.exp().cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    # A uniform next to 1 may round up to the total, which no entry exceeds.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp_(max=x.shape[1] - 1)


def scores(logprobs: Tensor, chosen: Tensor, counts: list[int], texts: Texts) -> list[PositionLogprobs]:
    """The chosen token of each row and its likeliest alternatives.

    Args:
        logprobs: (R, V) float32, the log of the model's own distribution: before temperature,
            penalties, bias or any filter.
        chosen: (R,) int64.
        counts: alternatives wanted for each row.
        texts: token id to its text.

    Returns:
        for each row the chosen token first, then the likeliest in order; rank 1 is the likeliest.
    """
    own = logprobs.gather(1, chosen[:, None])
    best = _likeliest(logprobs, counts)
    taken = zip(chosen.tolist(), own[:, 0].tolist(), _ranks(logprobs, own), strict=True)
    return [
        _position(token, value, rank, v[:count], i[:count], texts)
        for count, (token, value, rank), (v, i) in zip(counts, taken, best, strict=True)
    ]


def _ranks(logprobs: Tensor, own: Tensor) -> list[int]:
    if logprobs.device.type == "cpu":
        pairs = zip(logprobs.numpy(), own[:, 0].numpy(), strict=True)
        return [1 + int(np.count_nonzero(row > value)) for row, value in pairs]
    return ((logprobs > own).sum(-1) + 1).tolist()


def _likeliest(logprobs: Tensor, counts: list[int]) -> list[tuple[list[float], list[int]]]:
    """Values and ids of each row's likeliest, at least as many as it wants."""
    most = min(max(counts), logprobs.shape[1])
    if most == 0:
        return [([], [])] * len(counts)
    if logprobs.device.type == "cpu":
        pairs = ((row, rows_cpu.likeliest(row, most)) for row in logprobs.numpy())
        return [(row[ids].tolist(), ids.tolist()) for row, ids in pairs]
    values, ids = torch.topk(logprobs, most, dim=-1)
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _position(
    token: int, own: float, rank: int, values: list[float], ids: list[int], texts: Texts
) -> PositionLogprobs:
    found = {token: Logprob(own, rank, texts(token))}
    for place, (value, other) in enumerate(zip(values, ids, strict=True), start=1):
        if other != token and math.isfinite(value):
            found[other] = Logprob(value, place, texts(other))
    return found
