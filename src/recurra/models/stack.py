"""The model that Mamba, FalconMamba and Mamba-2 share: embedding, blocks of norm and mixer, norm, head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from recurra.cache.spec import AnySpec, ConvSSM, LayerState
from recurra.layers.base import mix
from recurra.layers.embedding import Embedding, Head
from recurra.layers.mamba1 import MambaMixer
from recurra.layers.mamba2 import MambaMixer2
from recurra.layers.norm import RMSNorm
from recurra.models.config import ModelConfig
from recurra.models.family import Build
from recurra.models.weights import Entry, draw_ones
from recurra.ops.decode_stack import StackWeights
from recurra.types import ForwardBatch

#: Tokens of a kernel chunk on the CPU and elsewhere. The answer doesn't depend on it, only the time: each is
#: what those kernels like best (checkpoints' ``chunk_size`` is about training).
CPU_CHUNK, GPU_CHUNK = 64, 64

#: What surrounds the mixers in a checkpoint.
OUTER_ENTRIES = (
    Entry("backbone.embeddings.weight", "embedding.weight"),
    Entry("backbone.layers.{i}.norm.weight", "layers.{i}.norm.weight", draw=draw_ones),
    Entry("backbone.norm_f.weight", "norm_f.weight", draw=draw_ones),
    Entry("lm_head.weight", "head.weight"),
)
TIED = ("lm_head.weight", "backbone.embeddings.weight")


class Block(nn.Module):
    """A norm and a mixer; what is between the blocks, the residual stream, is the stack's."""

    def __init__(self, norm: RMSNorm, mixer: MambaMixer | MambaMixer2) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer


class MambaStack(nn.Module):
    """A pure stack of Mamba blocks with a language-model head (see :class:`recurra.models.family.CausalLM`)."""

    def __init__(
        self, config: ModelConfig, mixer: Callable[[], MambaMixer | MambaMixer2], parts: Build
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        ops, dtypes, device = parts.ops, parts.dtypes, parts.device
        self.vocab_size = config.vocab_size
        self.chunk_size = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
        self._dtypes, self._add_rms_norm = dtypes, ops.add_rms_norm
        self.embedding = Embedding(config.vocab_size, width, dtypes=dtypes, device=device)
        self.layers = nn.ModuleList(
            Block(
                RMSNorm(width, eps, ops=ops, dtypes=dtypes, device=device),
                mixer(),
            )
            for _ in range(config.num_layers)
        )
        self.norm_f = RMSNorm(width, eps, ops=ops, dtypes=dtypes, device=device)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = Head(config.vocab_size, width, tied=tied, ops=ops, dtypes=dtypes, device=device)
        self.state_specs: tuple[AnySpec, ...] = tuple(block.mixer.state_spec() for block in self.blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, typed."""
        return tuple(block for block in self.layers if isinstance(block, Block))

    def forward(self, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """Hidden vectors (T, hidden) after the final norm; ``states`` are read and written in place."""
        blocks, act = self.blocks, self._dtypes.act
        residual: Tensor = self.embedding(batch.token_ids).to(self._dtypes.residual)
        x: Tensor = blocks[0].norm(residual).to(act)
        following = (*(block.norm for block in blocks[1:]), self.norm_f)
        for block, state, norm in zip(blocks, states, following, strict=True):
            assert isinstance(state, ConvSSM)
            y = mix(block.mixer, x, batch, state)
            x, residual = self._add_rms_norm(y, residual, norm.weight, norm.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, vocabulary), float32 (float64 if hidden is), of hidden vectors (R, hidden)."""
        scores: Tensor = self.head(hidden)
        return scores

    def stack_weights(self) -> StackWeights:
        """The tensors of a fused decode step; nothing is copied."""
        return StackWeights(
            embedding=self.embedding.weight.data,
            blocks=tuple(block.mixer.stack_weights(block.norm) for block in self.blocks),
            final_norm=self.norm_f.weight.data,
            final_norm_eps=self.norm_f.eps,
        )
