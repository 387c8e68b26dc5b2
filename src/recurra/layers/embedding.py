"""The two ends of a language model: token ids to vectors, and vectors to scores of every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes, parameter
from recurra.ops import Ops


class Embedding(nn.Module):
    """Rows of a table: token_ids (T,) int64 to (T, hidden) in the weights' dtype."""

    def __init__(self, vocab_size: int, hidden: int, *, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden, dtype=dtypes.weight, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class Head(nn.Module):
    """Scores of every token: hidden (R, hidden) to (R, vocabulary), float32 (float64 if hidden is).

    Args:
        tied: the embedding whose table is also the head's, or None for a table of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        tied: Embedding | None,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter
        if tied is None:
            self.weight = parameter(vocab_size, hidden, dtype=dtypes.weight, device=device)
        else:
            self.weight = tied.weight
        self._linear = ops.linear

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self._linear(hidden, self.weight)
        return logits if logits.dtype == torch.float64 else logits.float()
