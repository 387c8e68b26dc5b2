"""What a model family has to say about itself: its numbers, its parts and its checkpoint map, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from recurra.cache.spec import AnySpec, LayerState
from recurra.layers.dtypes import Dtypes
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.weights import Either, Entry
from recurra.ops import Ops
from recurra.ops.decode_stack import StackWeights
from recurra.types import ForwardBatch


class Tools(TypedDict):
    """What every layer is built with, as keyword arguments."""

    ops: Ops
    dtypes: Dtypes
    device: torch.device


@dataclass(frozen=True, slots=True)
class Build:
    """What a model is built with.

    Attributes:
        ops: the operators.
        dtypes: of its tensors.
        device: where they are.
    """

    ops: Ops
    dtypes: Dtypes
    device: torch.device

    @property
    def tools(self) -> Tools:
        """All three, for a layer: ``Attention(sizes, **parts.tools)``."""
        return {"ops": self.ops, "dtypes": self.dtypes, "device": self.device}

    def norm(self, config: ModelConfig) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(
            config.hidden_size, config.norm_eps, ops=self.ops, dtypes=self.dtypes, device=self.device
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        read: for each layout that its checkpoints come in, how its numbers are read: a frozen object that only
            this family knows.
        build: makes the model, its parameters not filled yet.
        entries: the checkpoint map of a configuration.
        tied: names in the checkpoint of the head's and the embedding's table. A tied head may be stored all
            the same, and must then equal the embedding.
        tied_default: whether the head is the embedding's table when transformers' configuration doesn't say.
        handles: keys of :data:`recurra.models.config.UNSUPPORTED` that ``read`` takes care of.
        residual_in_fp32: whether the residual stream stays float32 when the configuration doesn't say.
        section: of the configuration, that holds the language model's numbers in checkpoints that can do more
            than text; its keys go before those around it. None: there is none.
        adapt: gives the configuration the keys that every model has, where the family's files call them otherwise or
            leave them to be counted.
        renames: (pattern, replacement) of names in the checkpoint, before anything looks at them: other spellings
            of what ``entries`` names.
        skips: patterns of names of tensors that nothing needs (a vision tower, heads that draft tokens).
    """

    read: Mapping[Layout, Callable[[Fields], Any]]
    build: Callable[[ModelConfig, Build], CausalLM]
    entries: Callable[[ModelConfig], tuple[Entry | Either, ...]]
    tied: tuple[str, str]
    tied_default: bool
    handles: frozenset[str] = frozenset()
    residual_in_fp32: bool = False
    section: str | None = None
    adapt: Callable[[Fields], Fields] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    skips: tuple[str, ...] = ()


class CausalLM(Protocol):
    """A language model as the engine sees it.

    Attributes:
        vocab_size: columns of the logits.
        chunk_size: tokens of a kernel chunk, for :class:`recurra.types.Chunks`.
        state_specs: memory of one sequence, mixer by mixer: a row of the state pool, or keys and values.
    """

    vocab_size: int
    chunk_size: int
    state_specs: tuple[AnySpec, ...]

    def forward(self, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """Hidden vectors (T, hidden) after the final norm; ``states`` are read and written in place."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, vocabulary), float32, of hidden vectors (R, hidden)."""
        ...

    def stack_weights(self) -> StackWeights | None:
        """The tensors of a fused decode step, or None when the model is no plain stack of Mamba blocks."""
        ...
