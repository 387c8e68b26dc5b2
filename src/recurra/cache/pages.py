"""The page pool: keys and values of attention layers, in pages of a few tokens.

A page holds its tokens' keys and values of *all* attention layers, under one page number: a sequence has one
list of pages, whatever the model. Page 0 is scratch: padding reads and writes it, and nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recurra.cache.spec import KVSpec, PagedKV
from recurra.types import SCRATCH_PAGE


class PagePool:
    """Keys and values of up to ``num_pages`` pages, plus the scratch page 0.

    Args:
        specs: one for each attention layer.
        num_pages: pages that can be held at once; numbers 1 to ``num_pages``.
        page_size: tokens of a page.
        device: where the pages live.
    """

    def __init__(
        self, specs: tuple[KVSpec, ...], num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.specs, self.num_pages, self.page_size = specs, num_pages, page_size
        self.layers: tuple[PagedKV, ...] = tuple(
            PagedKV(*(_tensor(spec, num_pages + 1, page_size, dim, device) for dim in _dims(spec)))
            for spec in specs
        )

    def save(self, pages: Sequence[int]) -> list[Tensor]:
        """Copy pages out: keys and values of each layer, (pages, page size, heads, dim), never written again."""
        at = self._index(pages)
        return [tensor[at] for layer in self.layers for tensor in layer]

    def restore(self, pages: Sequence[int], saved: list[Tensor]) -> None:
        """Copy saved pages into ``pages``; what was saved is unchanged."""
        assert SCRATCH_PAGE not in pages, "page 0 is scratch"
        at = self._index(pages)
        for tensor, value in zip((t for layer in self.layers for t in layer), saved, strict=True):
            tensor[at] = value.to(tensor.device)

    def copy(self, source: int, target: int) -> None:
        """Make page ``target`` an independent copy of ``source``."""
        assert target != SCRATCH_PAGE, "page 0 is scratch"
        for layer in self.layers:
            for tensor in layer:
                tensor[target] = tensor[source]

    def _index(self, pages: Sequence[int]) -> Tensor:
        device = self.layers[0].k.device if self.layers else torch.device("cpu")
        return torch.tensor(list(pages), dtype=torch.int64, device=device)


def _dims(spec: KVSpec) -> tuple[int, int]:
    return spec.key_dim, spec.value_dim


def _tensor(spec: KVSpec, pages: int, page_size: int, dim: int, device: torch.device) -> Tensor:
    return torch.zeros(pages, page_size, spec.num_heads, dim, dtype=spec.dtype, device=device)


def page_bytes(specs: tuple[KVSpec, ...], page_size: int) -> int:
    """Bytes of one page over all attention layers."""
    return page_size * sum(spec.nbytes for spec in specs)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens take."""
    return math.ceil(tokens / page_size)
