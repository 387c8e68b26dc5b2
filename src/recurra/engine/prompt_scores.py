"""Log-probabilities of prompt tokens, in slices that bound the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.engine import rows
from recurra.engine.scheduler import PrefillChunk
from recurra.models import CausalLM
from recurra.types import PositionLogprobs


def prompt_scores(
    chunk: PrefillChunk, hidden: Tensor, model: CausalLM, texts: rows.Texts
) -> list[PositionLogprobs]:
    """Scores of the prompt tokens that this piece predicts: positions start + 1 to end.

    The last token of a piece predicts the first of the next, so nothing is left over at the edges.

    Args:
        chunk: the piece; its request asks for ``prompt_logprobs``.
        hidden: (length, hidden) of the piece's tokens.
        model: gives the logits; at most 2**24 of them exist at once.
    """
    count = chunk.sequence.request.params.prompt_logprobs
    assert count is not None
    targets = chunk.sequence.request.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
    step = rows.rows_at_once(model.vocab_size)
    found: list[PositionLogprobs] = []
    for at in range(0, len(targets), step):
        wanted = torch.tensor(targets[at : at + step], device=hidden.device)
        logprobs = torch.log_softmax(model.logits(hidden[at : at + len(wanted)]), -1)
        found += rows.scores(logprobs, wanted, [count] * len(wanted), texts)
    return found
