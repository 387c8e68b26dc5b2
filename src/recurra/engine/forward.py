"""Ways to run the model over a step's tokens. CUDA graphs will be one more."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recurra.cache.spec import ConvSSM, LayerState
from recurra.engine.batch import prefill_part
from recurra.models import CausalLM
from recurra.ops import Ops
from recurra.ops.decode_stack import BlockState, DecodeStack
from recurra.types import ForwardBatch


class Forward(Protocol):
    """Hidden states (T, hidden) of a step, final norm applied; states change in place."""

    def __call__(self, batch: ForwardBatch) -> Tensor: ...


class EagerForward:
    """Every operator by itself."""

    def __init__(self, model: CausalLM, states: tuple[LayerState, ...]) -> None:
        self.model = model
        self.states = states

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch, self.states)


class StackForward:
    """Decode rows as one compiled call, prompts through the model."""

    def __init__(self, eager: EagerForward, stack: DecodeStack) -> None:
        self.eager = eager
        self.stack = stack

    def __call__(self, batch: ForwardBatch) -> Tensor:
        if batch.num_decode == 0:
            return self.eager(batch)
        decoded = self.stack(batch.token_ids[: batch.num_decode], batch.decode_slots)
        if batch.num_prefill_tokens == 0:
            return decoded
        return torch.cat((decoded, self.eager(prefill_part(batch))))


def make_forward(
    model: CausalLM,
    states: tuple[LayerState, ...],
    ops: Ops,
    num_threads: int,
    enforce_eager: bool,
) -> Forward:
    """The fastest way that the device offers and the user allows."""
    eager = EagerForward(model, states)
    weights = None if enforce_eager or ops.build_decode_stack is None else model.stack_weights()
    if weights is None or ops.build_decode_stack is None:
        return eager
    blocks = tuple(BlockState(*s) for s in states if isinstance(s, ConvSSM))
    return StackForward(eager, ops.build_decode_stack(weights, blocks, num_threads))
