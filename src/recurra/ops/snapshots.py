"""States at asked-for token positions of a prefill step, written to rows of their own while the step runs.

Every packed operator leaves the state after a sequence's *last* token in its slot. So a sequence is cut at the asked-for
positions, and the pieces run in rounds: the first piece of every sequence, then the second of those that have one. After
each round slots are copied to where they are to be kept. Rounds of a single sequence are slices of its tokens; rounds
of several gather their rows. No kernel knows of this, so it holds for all: convolution, both scans, delta rules and
linear attention (docs/decisions/0003).

>>> rounds = plan(lengths=[300], slots=[7], has_state=[False], keep=[[(128, 3), (256, 4)]], chunk_size=64, device=cpu)
>>> y = run(lambda pick, where: scan(pick(x), pick(dt), A, pick(B), pick(C), D, bias, state, *where), rounds,
...         x.shape[0], ((state, kept_states),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recurra.types import Chunks

#: cu_seqlens, slots, has_state and chunks, as the packed operators take them.
Where = tuple[Tensor, Tensor, Tensor, Chunks]
Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Round:
    """One call of each operator.

    Attributes:
        tokens: the step's tokens in it: a slice, or (n,) int64.
        where: as the operators take it, for these tokens.
        kept: (k,) int64, slots to copy afterwards. rows: (k,) int64, where to.
    """

    tokens: slice | Tensor
    where: Where
    kept: Tensor
    rows: Tensor

    def pick(self, tensor: Tensor) -> Tensor:
        """The rows of these tokens."""
        return tensor[self.tokens]


def plan(
    lengths: Sequence[int],
    slots: Sequence[int],
    has_state: Sequence[bool],
    keep: Sequence[Sequence[tuple[int, int]]],
    chunk_size: int,
    device: torch.device,
) -> tuple[Round, ...]:
    """Cut a step's sequences at the positions asked for.

    Args:
        lengths, slots, has_state: of each sequence, in the order in which their tokens are packed.
        keep: of each sequence, (tokens, row) in rising order: the state after that many of the step's tokens, 1 to
            the sequence's length, goes to that row.
        chunk_size: largest kernel chunk; each piece is cut from its own first token.
        device: where the operators run.
    """
    begins = [0, *accumulate(lengths)]
    cuts = [_pieces(length, wanted) for length, wanted in zip(lengths, keep, strict=True)]
    rounds = []
    for r in range(max((len(c) for c in cuts), default=0)):
        mine = [s for s, c in enumerate(cuts) if len(c) > r]
        spans = [(begins[s] + cuts[s][r][0], begins[s] + cuts[s][r][1]) for s in mine]
        ends = {s: cuts[s][r][1] for s in mine}
        saved = [(slots[s], row) for s in mine for tokens, row in keep[s] if tokens == ends[s]]
        rounds.append(
            Round(
                _tokens(spans, device),
                (
                    _int32([0, *accumulate(b - a for a, b in spans)], device), _int32([slots[s] for s in mine], device),
                    torch.tensor([has_state[s] or r > 0 for s in mine], dtype=torch.bool, device=device),
                    _chunks([b - a for a, b in spans], chunk_size, device),
                ),
                torch.tensor([slot for slot, _ in saved], dtype=torch.int64, device=device),
                torch.tensor([row for _, row in saved], dtype=torch.int64, device=device),
            )
        )  # fmt: skip
    return tuple(rounds)


def _pieces(length: int, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    positions = [tokens for tokens, _ in wanted]
    assert positions == sorted(positions), f"positions {positions} must rise"
    assert all(0 < p <= length for p in positions), f"positions {positions} of {length} tokens"
    edges = [0, *dict.fromkeys(positions), length]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def _tokens(spans: list[tuple[int, int]], device: torch.device) -> slice | Tensor:
    if all(a[1] == b[0] for a, b in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(a, b) for a, b in spans]).to(device)


def _int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _chunks(lengths: list[int], size: int, device: torch.device) -> Chunks:
    starts = [0, *accumulate(lengths)]
    cut = [(s, at, min(size, n - at)) for s, n in enumerate(lengths) for at in range(0, n, size)]
    before = [0, *accumulate(-(-n // size) for n in lengths)]
    return Chunks(
        size, _int32([s for s, _, _ in cut], device), _int32([starts[s] + at for s, at, _ in cut], device),
        _int32([n for _, _, n in cut], device), _int32(before, device),
    )  # fmt: skip


def run(
    operator: Callable[[Pick, Where], Tensor],
    rounds: Sequence[Round],
    num_tokens: int,
    states: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Run one operator round by round, keeping its states between them.

    Args:
        operator: calls the operator, given what picks a round's rows out of a tensor of the step, and the round's
            bounds, slots, flags and chunks; it writes its states in place.
        rounds: from :func:`plan`.
        num_tokens: T, of the step.
        states: (by slot, kept) pairs: **kept is written** in the rows asked for. Both have the same shape but for the
            first dimension, and any stride there.

    Returns:
        (T, ...): each token's output.
    """
    out: Tensor | None = None
    for part in rounds:
        y = operator(part.pick, part.where)
        for state, kept in states:
            _copy(state, part.kept, kept, part.rows)
        if len(rounds) == 1:
            return y
        if out is None:
            out = torch.empty((num_tokens, *y.shape[1:]), dtype=y.dtype, device=y.device)
        out[part.tokens] = y
    assert out is not None, "a step without a token"
    return out


def _copy(source: Tensor, slots: Tensor, target: Tensor, rows: Tensor) -> None:
    if slots.shape[0] == 0 or source[0].numel() == 0:
        return
    if source.dtype.itemsize == 1:  # formats that PyTorch can't index
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target[rows] = source[slots]
