"""Ways to run the model over a step's tokens."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from recurra.cache.spec import ConvSSM, LayerState
from recurra.engine.batch import prefill_part
from recurra.engine.graphs import Buffers, CudaRecorder, GraphForward, GraphLimits, graph_refusal
from recurra.models import CausalLM
from recurra.ops import Ops
from recurra.ops.decode_stack import BlockState, DecodeStack
from recurra.types import ForwardBatch

log = logging.getLogger("recurra")


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
    limits: GraphLimits,
) -> Forward:
    """The fastest way that the device offers and the user allows."""
    eager = EagerForward(model, states)
    if enforce_eager:
        return eager
    if limits.device.type == "cuda":
        refusal = graph_refusal(ops, model.state_specs)
        if refusal is None:
            return GraphForward(eager, Buffers.make(limits), CudaRecorder(limits.device))
        log.warning("decode steps run without CUDA graphs: %s", refusal)
        return eager
    weights = None if ops.build_decode_stack is None else model.stack_weights()
    if weights is None or ops.build_decode_stack is None:
        return eager
    blocks = tuple(BlockState(*s) for s in states if isinstance(s, ConvSSM))
    return StackForward(eager, ops.build_decode_stack(weights, blocks, num_threads))
