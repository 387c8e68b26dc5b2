"""Slot 0 as a slot like others, for callers whose padding mark is another: the packed stores skip it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recurra.ops.rounding import Rounding

_Store = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Rounding], None]


def store_everywhere(
    store: _Store,
    state: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    value: Tensor,
    bounds: Tensor,
    rounding: Rounding,
    pad_slot: int,
) -> None:
    """``store``, and what is meant for slot 0 by way of a spare row, unless slot 0 is padding.

    Args:
        bounds: (S + 1,) int32; entries whose two bounds are equal store nothing. At most one may go to slot 0.
    """
    store(state, scale, slots, value, bounds, rounding)
    if pad_slot == 0:
        return
    first = (slots == 0) & (bounds.diff() > 0)
    spare = torch.zeros_like(state[:1].expand(2, *state.shape[1:]), memory_format=torch.contiguous_format)
    spare_scale = (
        None if scale is None else torch.zeros((2, *scale.shape[1:]), dtype=scale.dtype, device=scale.device)
    )
    only = torch.cat([bounds.new_zeros(1), first.cumsum(0, dtype=torch.int32)])
    store(spare, spare_scale, torch.ones_like(slots), value, only, rounding)
    wanted = first.any()
    for whole, row in ((state, spare), (scale, spare_scale)):
        if whole is not None and row is not None and whole.shape[1:].numel():
            if whole.dtype.itemsize == 1:  # formats that PyTorch can't choose between
                whole, row = whole.view(torch.uint8), row.view(torch.uint8)  # noqa: PLW2901
            whole[0] = torch.where(wanted, row[1], whole[0])
