"""Decode steps as CUDA graphs: recorded once for a ladder of batch sizes, then replayed.

A step of 64 layers is some hundreds of kernels, and launching them one by one takes longer than a small batch
computes. A graph launches all at once, but always the same kernels on the same memory: a step's inputs are copied
into fixed buffers, padded to the next recorded size with rows of the scratch slot, which no kernel reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recurra.cache.spec import AnySpec, KVSpec
from recurra.engine.batch import prefill_part
from recurra.ops import Ops
from recurra.types import SCRATCH_PAGE, SCRATCH_SLOT, Chunks, ForwardBatch

if TYPE_CHECKING:
    from recurra.engine.forward import Forward

#: A call to be recorded, and what recording it gives: the replay, and the output that each replay fills anew.
Call = Callable[[], Tensor]
Record = Callable[[Call], tuple[Callable[[], None], Tensor]]

#: Sizes double up to here and then go on in steps of as many.
_EVEN = 64

#: Operators that decode rows reach, by the kind of state that a mixer has.
_OPERATORS = {
    "mamba1": ("causal_conv1d_update", "selective_state_update"),
    "mamba2": ("causal_conv1d_update", "selective_state_update"),
    "lightning": ("lightning_attention_update",),
    "delta": ("causal_conv1d_update", "gated_delta_rule_update"),
    "short_conv": ("short_conv_update",),
    "rg_lru": ("causal_conv1d_update", "rg_lru_update"),
}
_PAGED = ("store_kv", "attention_update")
_ALWAYS = ("linear", "rms_norm")


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4 ... 64, then every 64th, and the largest."""
    sizes = {min(2**i, most) for i in range(_EVEN.bit_length())}
    return tuple(sorted(sizes | set(range(_EVEN, most, _EVEN)) | {most}))


def graph_refusal(ops: Ops, specs: tuple[AnySpec, ...]) -> str | None:
    """Why decode steps of a model can't be recorded with these operators; None where they can.

    The reference looks at values on the host, which a graph can't.
    """
    reached = {*_ALWAYS}
    for spec in specs:
        reached.update(_PAGED if isinstance(spec, KVSpec) else _OPERATORS.get(spec.kind, ()))
    slow = sorted(c.operator for c in ops.choices if c.operator in reached and c.backend == "reference")
    return f"{', '.join(slow)} run on the reference backend" if slow else None


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What decode steps never exceed.

    Attributes:
        rows: sequences.
        max_context: tokens of a sequence.
        page_size: tokens of a page; 0 in a model without attention.
        device: where the model runs.
    """

    rows: int
    max_context: int
    page_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory that graphs read, for up to ``len(token_ids)`` rows.

    Attributes:
        token_ids, positions, kv_rows: (rows,) int64.
        slots, context_lens: (rows,) int32.
        page_table: (rows, pages of the longest context) int32; no columns in a model without attention.
        max_context: the longest context that the page table holds.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    context_lens: Tensor
    kv_rows: Tensor
    max_context: int

    @classmethod
    def make(cls, limits: GraphLimits) -> Buffers:
        """Buffers of rows that all are padding."""
        rows, size, device = limits.rows, limits.page_size, limits.device
        wide = torch.zeros(3, rows, dtype=torch.int64, device=device)
        narrow = torch.full((2, rows), SCRATCH_SLOT, dtype=torch.int32, device=device)
        pages = -(-limits.max_context // size) if size else 0
        table = torch.full((rows, pages), SCRATCH_PAGE, dtype=torch.int32, device=device)
        kv_rows = wide[2] if size else wide[2, :0]
        return cls(wide[0], wide[1], narrow[0], table, narrow[1], kv_rows, limits.max_context)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy the decode rows of a step in, and make the rows after them, up to ``size``, padding."""
        rows = batch.num_decode
        self.token_ids[:rows].copy_(batch.token_ids[:rows])
        self.positions[:rows].copy_(batch.positions[:rows])
        self.slots[:rows].copy_(batch.decode_slots)
        if rows < size:
            self.slots[rows:size].fill_(SCRATCH_SLOT)
        if self.page_table.shape[1]:
            self._fill_pages(batch, rows, size)

    def _fill_pages(self, batch: ForwardBatch, rows: int, size: int) -> None:
        pages = batch.decode_pages
        self.page_table[:rows, : pages.shape[1]].copy_(pages)
        self.context_lens[:rows].copy_(batch.context_lens[:rows])
        self.kv_rows[:rows].copy_(batch.kv_rows[:rows])
        if rows < size:
            self.page_table[rows:size].fill_(SCRATCH_PAGE)
            self.context_lens[rows:size].fill_(0)
            self.kv_rows[rows:size].fill_(0)

    def clear(self, size: int) -> None:
        """Make the first ``size`` rows padding."""
        self.slots[:size].fill_(SCRATCH_SLOT)
        self.page_table[:size].fill_(SCRATCH_PAGE)
        self.context_lens[:size].fill_(0)
        self.kv_rows[:size].fill_(0)

    def batch(self, size: int) -> ForwardBatch:
        """A step of ``size`` decode rows that reads this memory."""
        none = self.slots[:0]
        return ForwardBatch(
            token_ids=self.token_ids[:size], positions=self.positions[:size], slots=self.slots[:size],
            num_decode=size, cu_seqlens=self.slots.new_zeros(1), has_state=none.to(torch.bool), max_seqlen=0,
            chunks=Chunks(1, none, none, none, self.slots.new_zeros(1)), logit_rows=self.token_ids[:0],
            page_table=self.page_table[:size], context_lens=self.context_lens[:size],
            kv_rows=self.kv_rows[:size], max_context=self.max_context,
        )  # fmt: skip


class CudaRecorder:
    """Records calls as CUDA graphs that share their memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> tuple[Callable[[], None], Tensor]:
        """Run once, which compiles what isn't, then record."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            call()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return graph.replay, out


class GraphForward:
    """Decode rows by a graph, prompts through the model.

    Args:
        eager: runs the model.
        buffers: what the graphs read; as many rows as the largest batch.
        record: how a call becomes a graph.
    """

    def __init__(self, eager: Forward, buffers: Buffers, record: Record) -> None:
        self.eager = eager
        self.sizes = ladder(len(buffers.token_ids))
        self._buffers = buffers
        self._record = record
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Sizes that aren't recorded yet, the largest first: the others then fit into its memory."""
        return tuple(size for size in reversed(self.sizes) if size not in self._graphs)

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record a size; rows of padding alone are computed meanwhile."""
        self._buffers.clear(size)
        batch = self._buffers.batch(size)
        self._graphs[size] = self._record(lambda: self.eager(batch))

    def __call__(self, batch: ForwardBatch) -> Tensor:
        rows = batch.num_decode
        if rows == 0:
            return self.eager(batch)
        size = self.sizes[bisect_left(self.sizes, rows)]
        if size not in self._graphs:
            self.record(size)
        self._buffers.fill(batch, size)
        replay, out = self._graphs[size]
        replay()
        decoded = out[:rows]
        if batch.num_prefill_tokens == 0:
            return decoded
        return torch.cat((decoded, self.eager(prefill_part(batch))))
