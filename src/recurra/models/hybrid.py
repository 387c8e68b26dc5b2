"""What hybrid models are made of: blocks of mixers and feed-forward layers between an embedding and a head.

A family's file chooses the blocks, layer by layer; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recurra.cache.spec import AnySpec, LayerState
from recurra.layers.base import Mixer, mix
from recurra.layers.embedding import Embedding, Head
from recurra.layers.norm import RMSNorm
from recurra.models.config import ModelConfig
from recurra.models.family import Build
from recurra.models.stack import CPU_CHUNK, GPU_CHUNK
from recurra.models.weights import Entry, as_is, draw_ones
from recurra.types import ForwardBatch


class Layer(Protocol):
    """One layer of a model.

    Attributes:
        mixers: its parts that remember, in the order of their states; perhaps none.
    """

    mixers: tuple[Mixer[Any], ...]

    def __call__(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """The residual stream (T, hidden) to the same; one state a mixer, written in place."""
        ...


class Stream:
    """The residual stream between the parts of blocks.

    What the last part gave is added when it is asked for: where a norm comes next, one kernel does both.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._given: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """All that was added up to now, (T, hidden)."""
        if self._given is not None:
            self._x, self._given = self._x + self._given, None
        return self._x

    def add(self, given: Tensor) -> None:
        """Add what a part gave."""
        self._x, self._given = self.value, given

    def normed(self, norm: nn.Module | None) -> Tensor:
        """What the next part gets: the stream through its norm."""
        if self._given is not None and type(norm) is RMSNorm:
            y, self._x = norm.of_sum(self._given, self._x)
            self._given = None
            return y
        y = self.value
        return y if norm is None else norm(y)


class Block(nn.Module):
    """``x += scale * post_norm(mixer(norm(x)))``, then the same with an MLP; each piece may be absent.

    With norms before, after or on both sides it is a pre-norm, post-norm or sandwich block.

    Args:
        act: dtype of activations, for what enters a mixer or an MLP.
        mixer: what remembers, with the norms before and after it.
        mlp: (rows, hidden) to the same, with the norms before and after it.
        scale: of what is added to the residual stream.
    """

    def __init__(
        self,
        act: torch.dtype,
        *,
        norm: nn.Module | None = None,
        mixer: nn.Module | None = None,
        post_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        mlp: nn.Module | None = None,
        mlp_post_norm: nn.Module | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.norm, self.mixer, self.post_norm = norm, mixer, post_norm
        self.mlp_norm, self.mlp, self.mlp_post_norm = mlp_norm, mlp, mlp_post_norm
        self._act, self._scale = act, scale
        self.mixers: tuple[Any, ...] = () if mixer is None else (mixer,)

    def forward(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """See :class:`Layer`."""
        stream = Stream(x)
        self.advance(stream, batch, states)
        return stream.value

    def advance(self, stream: Stream, batch: ForwardBatch, states: tuple[LayerState, ...]) -> None:
        """The same on a stream that goes on to the next block."""
        for mixer, state in zip(self.mixers, states, strict=True):
            x = stream.normed(self.norm).to(self._act)
            stream.add(self._given(mix(mixer, x, batch, state), self.post_norm))
        if self.mlp is not None:
            x = stream.normed(self.mlp_norm).to(self._act)
            stream.add(self._given(self.mlp(x), self.mlp_post_norm))

    def _given(self, y: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None:
            y = norm(y)
        return y if self._scale == 1.0 else y * self._scale


class HybridLM(nn.Module):
    """A language model of blocks (see :class:`recurra.models.family.CausalLM`).

    Args:
        config: the checkpoint's numbers.
        blocks: every layer, in order.
        parts: what it is built with.
        embedding_scale: of the embedded tokens.
        logits_scale: of the scores.
        softcap: bound of the scores, ``softcap * tanh(scores / softcap)``; 0 is none.
        final_norm: None: an RMS norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Iterable[nn.Module],
        parts: Build,
        *,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        softcap: float = 0.0,
        final_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        ops, dtypes, device = parts.ops, parts.dtypes, parts.device
        width = config.hidden_size
        self.vocab_size = config.vocab_size
        self.chunk_size = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
        self._dtypes = dtypes
        self._embedding_scale, self._logits_scale, self._softcap = embedding_scale, logits_scale, softcap
        self.embedding = Embedding(config.vocab_size, width, dtypes=dtypes, device=device)
        self.layers = nn.ModuleList(blocks)
        self.norm_f = final_norm or RMSNorm(width, config.norm_eps, ops=ops, dtypes=dtypes, device=device)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = Head(config.vocab_size, width, tied=tied, ops=ops, dtypes=dtypes, device=device)
        mixers = [mixer for layer in self.layers for mixer in as_layer(layer).mixers]
        self.state_specs: tuple[AnySpec, ...] = tuple(mixer.state_spec() for mixer in mixers)

    def forward(self, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """Hidden vectors (T, hidden) after the final norm; ``states`` are read and written in place."""
        x: Tensor = self.embedding(batch.token_ids).to(self._dtypes.residual)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        hidden: Tensor = self.norm_f(self.run_layers(x, batch, states))
        return hidden.to(self._dtypes.act)

    def run_layers(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """The residual stream (T, hidden) through every layer: what a family overrides whose layers see more."""
        at, stream = 0, Stream(x)
        for module in self.layers:
            layer = as_layer(module)
            own = states[at : at + len(layer.mixers)]
            at += len(layer.mixers)
            if isinstance(module, Block):
                module.advance(stream, batch, own)
            else:
                stream = Stream(layer(stream.value, batch, own))
        assert at == len(states), (at, len(states))
        return stream.value

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, vocabulary), float32 (float64 if hidden is), of hidden vectors (R, hidden)."""
        scores: Tensor = self.head(hidden)
        if self._logits_scale != 1.0:
            scores = scores * self._logits_scale
        return scores if self._softcap == 0.0 else self._softcap * torch.tanh(scores / self._softcap)

    def stack_weights(self) -> None:
        """No fused step: the layers are of several kinds."""


def as_layer(module: nn.Module) -> Layer:
    """The layer, typed."""
    return module  # type: ignore[return-value]


def outer_entries(
    norm: str = "model.norm.weight",
    embedding: str = "model.embed_tokens.weight",
    convert: Callable[[Tensor], Tensor] = as_is,
) -> tuple[Entry, ...]:
    """The checkpoint map of what surrounds the layers; ``convert`` is of the norm's weight."""
    return (
        Entry(embedding, "embedding.weight"),
        Entry(norm, "norm_f.weight", convert, draw_ones),
        Entry("lm_head.weight", "head.weight"),
    )


#: Names of the head's and the embedding's table in most hybrids.
TIED = ("lm_head.weight", "model.embed_tokens.weight")
