"""Runs a model by hand: builds each step's ForwardBatch, keeps the state pool, and greedily decodes.

It stands for the engine in tests of the models, and is written independently of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from recurra.cache.pages import PagePool
from recurra.cache.pool import StatePool
from recurra.cache.spec import LayerState, join_layers, paged, recurrent
from recurra.models import CausalLM
from recurra.types import Chunks, ForwardBatch


@dataclass(slots=True)
class Piece:
    """Some next tokens of the sequence in ``slot``, of which ``start`` came before."""

    slot: int
    tokens: Sequence[int]
    start: int = 0


def _int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def cut(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Chunks of packed sequences of these lengths, each cut from its own first token."""
    seq, start, length, cu = [], [], [], [0]
    first = 0
    for number, tokens in enumerate(lengths):
        for offset in range(0, tokens, size):
            seq.append(number)
            start.append(first + offset)
            length.append(min(size, tokens - offset))
        first += tokens
        cu.append(len(seq))
    return Chunks(
        size, _int32(seq, device), _int32(start, device), _int32(length, device), _int32(cu, device)
    )


#: Tokens of a page, and the pages of a slot: enough for every test's prompt with its answer.
PAGE, PAGES_PER_SLOT = 8, 32


def pages_of(slot: int, num_slots: int) -> list[int]:
    """The pages of a slot, far apart and none of them page 0; slot 0 has page 0 alone."""
    if slot == 0:
        return [0]
    return [1 + (slot - 1) + j * num_slots for j in range(PAGES_PER_SLOT)]


def build_batch(
    decode: Sequence[Piece],
    prefill: Sequence[Piece],
    chunk_size: int,
    device: torch.device,
    num_slots: int = 0,
) -> ForwardBatch:
    """One step's batch: decode rows first, then packed prefill; pages for ``num_slots`` slots, or none."""
    pieces = [*decode, *prefill]
    contexts = [piece.start + len(piece.tokens) if piece.slot else 0 for piece in pieces]
    tables = [pages_of(piece.slot, num_slots) if num_slots else [] for piece in pieces]
    used = [-(-context // PAGE) for context in contexts]
    width = max(used) if num_slots else 0
    rows = [
        table[p // PAGE] * PAGE + p % PAGE
        for piece, table in zip(pieces, tables, strict=True)
        for p in range(piece.start, piece.start + len(piece.tokens))
        if table
    ]
    table = [(t[:n] + [0] * width)[:width] for t, n in zip(tables, used, strict=True)]
    token_ids = [token for piece in pieces for token in piece.tokens]
    positions = [piece.start + i for piece in pieces for i in range(len(piece.tokens))]
    lengths = [len(piece.tokens) for piece in prefill]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=_int32([piece.slot for piece in pieces], device),
        num_decode=len(decode),
        cu_seqlens=_int32(bounds, device),
        has_state=torch.tensor([piece.start > 0 for piece in prefill], dtype=torch.bool, device=device),
        max_seqlen=max(lengths, default=0),
        chunks=cut(lengths, chunk_size, device),
        logit_rows=torch.arange(len(token_ids), device=device),
        page_table=torch.tensor(table, dtype=torch.int32, device=device).view(len(pieces), width),
        context_lens=_int32(contexts, device),
        kv_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        max_context=max(contexts),
    )


@dataclass(slots=True)
class Driver:
    """A model with a state pool whose every row is NaN until somebody writes it."""

    model: CausalLM
    num_slots: int = 8
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pool: StatePool = field(init=False)
    pages: PagePool = field(init=False)
    states: tuple[LayerState, ...] = field(init=False)

    def __post_init__(self) -> None:
        specs, attending = self.model.state_specs, paged(self.model.state_specs)
        self.pool = StatePool(recurrent(specs), self.num_slots, self.device)
        self.pages = PagePool(attending, self.num_slots * PAGES_PER_SLOT, PAGE, self.device)
        self.states = join_layers(specs, self.pool.layers, self.pages.layers)
        for slot in range(self.num_slots + 1):
            self.poison(slot)

    def poison(self, slot: int) -> None:
        """Fill a slot and its pages with NaN, as a finished sequence that went wrong would leave them."""
        self.poison_pages(slot)
        for layer in self.pool.layers:
            for state in (layer.conv, layer.ssm):
                state[slot] = float("nan")

    def poison_pages(self, slot: int) -> None:
        """Fill a slot's pages with NaN."""
        pages = pages_of(slot, self.num_slots)
        for kv in self.pages.layers:
            kv.k[pages], kv.v[pages] = float("nan"), float("nan")

    @torch.inference_mode()
    def step(self, decode: Sequence[Piece] = (), prefill: Sequence[Piece] = ()) -> list[Tensor]:
        """Run one step: for each piece, decode rows first, its log-probs (tokens, vocabulary)."""
        assert all(len(piece.tokens) == 1 for piece in decode)
        for piece in prefill:
            if piece.start == 0:
                self.poison_pages(piece.slot)
        pages = self.num_slots if self.pages.layers else 0
        batch = build_batch(decode, prefill, self.model.chunk_size, self.device, pages)
        hidden = self.model.forward(batch, self.states)
        log_probs = self.model.logits(hidden[batch.logit_rows]).log_softmax(-1)
        return list(log_probs.split([len(piece.tokens) for piece in [*decode, *prefill]]))

    def whole(self, tokens: Sequence[int], slot: int = 1) -> Tensor:
        """Log-probs (tokens, vocabulary) of a prompt in one step."""
        return self.step(prefill=[Piece(slot, tokens)])[0]

    def pieces(self, tokens: Sequence[int], cuts: Sequence[int], slot: int = 1) -> Tensor:
        """The same in several steps of prefill, cut at these positions."""
        bounds = [0, *cuts, len(tokens)]
        return torch.cat([self.step(prefill=[Piece(slot, tokens[a:b], a)])[0] for a, b in pairwise(bounds)])

    def token_by_token(self, tokens: Sequence[int], slot: int = 1) -> Tensor:
        """The same, the first token as a prompt and each other as a decode step."""
        rows = [self.step(prefill=[Piece(slot, tokens[:1])])[0]]
        rows += [self.step(decode=[Piece(slot, [t], i)])[0] for i, t in enumerate(tokens) if i > 0]
        return torch.cat(rows)

    def greedy(self, prompt: Sequence[int], count: int, slot: int = 1) -> list[int]:
        """The ``count`` likeliest next tokens, one decode step each."""
        tokens = [*prompt, int(self.whole(prompt, slot)[-1].argmax())]
        while len(tokens) < len(prompt) + count:
            row = self.step(decode=[Piece(slot, tokens[-1:], len(tokens) - 1)])[0]
            tokens.append(int(row[-1].argmax()))
        return tokens[len(prompt) :]
