"""What a model family has to say about itself: three pieces of data, in one file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recurra.cache.spec import ConvSSM, StateSpec
from recurra.layers.dtypes import Dtypes
from recurra.layers.mamba1 import Mamba1Sizes, MambaMixer
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.weights import Entry
from recurra.ops import Ops
from recurra.ops.decode_stack import StackWeights
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        read: for each layout that its checkpoints come in, how its numbers are read.
        mixer: builds one layer's mixer.
        entries: the checkpoint map of one mixer and the parts around it.
        tied_default: whether the head is the embedding's table when transformers' configuration doesn't say.
    """

    read: Mapping[Layout, Callable[[Fields], Mamba1Sizes | Mamba2Sizes]]
    mixer: Callable[[ModelConfig, Ops, Dtypes, torch.device], MambaMixer | MambaMixer2]
    entries: tuple[Entry, ...]
    tied_default: bool


class CausalLM(Protocol):
    """A language model as the engine sees it.

    Attributes:
        vocab_size: columns of the logits.
        chunk_size: tokens of a kernel chunk, for :class:`recurra.types.Chunks`.
        state_specs: memory of one sequence, layer by layer.
    """

    vocab_size: int
    chunk_size: int
    state_specs: tuple[StateSpec, ...]

    def forward(self, batch: ForwardBatch, states: tuple[ConvSSM, ...]) -> Tensor:
        """Hidden vectors (T, hidden) after the final norm; ``states`` are read and written in place."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, vocabulary), float32, of hidden vectors (R, hidden)."""
        ...

    def stack_weights(self) -> StackWeights | None:
        """The tensors of a fused decode step, or None when the model is no plain stack of Mamba blocks."""
        ...
