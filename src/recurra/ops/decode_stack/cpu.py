"""The CPU backend's decode step: binds weights and states to a compiled job."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, table
from recurra.ops.cpu.jit import address
from recurra.ops.cpu.threads import ThreadPool, thread_pool
from recurra.ops.decode_stack import BlockState, DecodeStack, Mamba1Weights, Mamba2Weights, StackWeights
from recurra.ops.decode_stack import cpu_common as words
from recurra.ops.decode_stack.cpu_mamba1 import mamba1_step
from recurra.ops.decode_stack.cpu_mamba2 import mamba2_step
from recurra.ops.linear.cpu import KINDS, chunk_rows, fits_tiles, matrix_words, scratch_row
from recurra.ops.rounding.cpu import chance_words, stored_words
from recurra.ops.ssm.cpu_update import work_floats

_Weights = Mamba1Weights | Mamba2Weights


class _Block:
    """A block's row of the table, and the tensors that its addresses point to."""

    def __init__(self, weights: _Weights, state: BlockState) -> None:
        self.words: list[int | float] = [0] * words.BLOCK_WORDS
        self.keep: list[Tensor] = []
        self.weights = weights
        self.rounding, self.chance = state.rounding, chance_words(state.rounding)
        self._common(weights, state.conv)
        self._recurrent(state.ssm, state.scale)
        if isinstance(weights, Mamba1Weights):
            self._mamba1(weights)
        else:
            self._mamba2(weights)

    def _vector(self, at: int, tensor: Tensor | None, name: str) -> None:
        if tensor is not None:
            self.keep.append(as_float32(tensor, name).contiguous())
            self.words[at] = self.keep[-1].data_ptr()

    def _matrix(self, at: int, weight: Tensor, bias: Tensor | None, name: str) -> None:
        self.keep.append(weight.detach().contiguous())
        if bias is not None:
            bias = as_float32(bias, name).contiguous()
            self.keep.append(bias)
        self.words[at : at + 6] = matrix_words(self.keep[-2 if bias is not None else -1], bias)

    def _window(self, state: Tensor) -> None:
        if state.dtype != torch.float32:
            raise ConfigError(
                "mamba_cache_dtype", str(state.dtype).removeprefix("torch."),
                "the compiled CPU step keeps float32 windows.", 'Use "float32", or enforce_eager=True.',
            )  # fmt: skip
        assert state[0].is_contiguous(), state.stride()
        self.words[words.CONV_STATE : words.CONV_STATE + 2] = [state.data_ptr(), row_bytes(state)]
        self.keep.append(state)

    def _recurrent(self, state: Tensor, scale: Tensor | None) -> None:
        self.columns = state.shape[-1]
        self.keep.append(state)
        self.words[words.SSM_STATE : words.SSM_STATE + 2] = [state.data_ptr(), row_bytes(state)]
        self.words[words.STATE_BYTES] = state.element_size()
        if state.dtype == torch.float32:
            assert state[0].is_contiguous(), state.stride()
            return
        self.keep.append(stored_words(state, scale, self.chance))
        self.words[words.STORED] = self.keep[-1].data_ptr()
        if scale is not None:
            self.keep.append(scale)

    def draw_afresh(self) -> None:
        """Take over the step that the states are at."""
        if self.rounding.stochastic:
            self.chance.copy_(chance_words(self.rounding))

    def _common(self, weights: _Weights, conv: Tensor) -> None:
        self._vector(words.NORM, weights.norm, "norm")
        self.words[words.NORM_EPS] = float(weights.norm_eps)
        self._vector(words.CONV_WEIGHT, weights.conv_weight, "conv_weight")
        self._vector(words.CONV_BIAS, weights.conv_bias, "conv_bias")
        self.words[words.CONV_WIDTH] = weights.conv_weight.shape[1]
        self._window(conv)
        self._vector(words.A_MATRIX, weights.A, "A")
        self._vector(words.SKIP, weights.D, "D")
        self._vector(words.STEP_BIAS, weights.dt_bias, "dt_bias")
        self._matrix(words.IN_PROJ, weights.in_proj, weights.in_proj_bias, "in_proj_bias")
        self._matrix(words.OUT_PROJ, weights.out_proj, weights.out_proj_bias, "out_proj_bias")

    def _mamba1(self, weights: Mamba1Weights) -> None:
        self._matrix(words.X_PROJ, weights.x_proj, None, "x_proj")
        self._matrix(words.STEP_PROJ, weights.dt_proj, None, "dt_proj")
        eps = weights.bcdt_norm_eps
        inner, N = weights.A.shape
        self.words[words.INNER : words.BCDT_EPS + 1] = [
            inner, N, weights.dt_proj.shape[1], int(eps is not None), float(eps or 0.0),
        ]  # fmt: skip

    def _mamba2(self, weights: Mamba2Weights) -> None:
        self.words[words.STATE] = weights.state_size
        self.words[words.HEADS : words.GATED_NORM] = [
            weights.num_heads, weights.head_dim, weights.num_groups, *map(float, weights.dt_limit),
        ]  # fmt: skip
        self._vector(words.GATED_NORM, weights.gated_norm, "gated_norm")
        self.words[words.GATED_EPS] = float(weights.gated_norm_eps)
        self.words[words.GATED_GROUP] = weights.gated_norm_group

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of a row's buffers: in projection, x projection, mixer."""
        narrow = self.weights.x_proj.shape[0] if isinstance(self.weights, Mamba1Weights) else 0
        return self.weights.in_proj.shape[0], narrow, self.weights.out_proj.shape[1]


class CpuDecodeStack:
    """See :class:`recurra.ops.decode_stack.DecodeStack`. One call at a time.

    Padding rows (slot 0) touch no state, and their output means nothing.
    """

    def __init__(
        self, weights: StackWeights, states: tuple[BlockState, ...], pool: ThreadPool, job: int
    ) -> None:
        self._pool, self._job = pool, job
        self._blocks = [
            _Block(w, BlockState(*state)) for w, state in zip(weights.blocks, states, strict=True)
        ]
        self._table = torch.stack([table(*block.words) for block in self._blocks])
        self._embedding = weights.embedding.detach().contiguous()
        self._final_norm = as_float32(weights.final_norm, "final_norm").contiguous()
        self._final_eps = float(weights.final_norm_eps)
        self._num_slots = states[0][0].shape[0]
        self._widths = [max(column) for column in zip(*(b.widths for b in self._blocks), strict=True)]
        self._tiled = all(fits_tiles(w.in_proj) and fits_tiles(w.out_proj) for w in weights.blocks)
        self._buffers = self._allocate(1)
        self._scratch = self._allocate_scratch(1)

    def _allocate(self, batch: int) -> list[Tensor]:
        hidden, (wide, narrow, mixed) = self._embedding.shape[1], self._widths
        return [torch.zeros(batch, width) for width in (hidden, hidden, wide, narrow, mixed, mixed)]

    def _chunk_rows(self, columns: int, batch: int) -> int:
        return chunk_rows(columns, batch, self._tiled, self._pool.num_threads)

    def _allocate_scratch(self, batch: int) -> Tensor:
        columns = max(self._embedding.shape[1], self._widths[2])
        size = max(scratch_row(batch, columns), *(4 * work_floats(block.columns) for block in self._blocks))
        return torch.zeros(self._pool.num_threads, size, dtype=torch.uint8)

    def _check(self, token_ids: Tensor, slots: Tensor) -> None:
        vocabulary = self._embedding.shape[0]
        for name, values, limit in (("token_ids", token_ids, vocabulary), ("slots", slots, self._num_slots)):
            array = values.numpy()
            if array.min() < 0 or array.max() >= limit:
                raise IndexError(f"{name} go from {array.min()} to {array.max()}; valid: 0 to {limit - 1}")

    def __call__(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """
        Raises:
            IndexError: a token beyond the vocabulary or a slot beyond the pool.
        """
        batch, hidden = token_ids.shape[0], self._embedding.shape[1]
        out = torch.empty(batch, hidden, dtype=torch.float32)
        if not batch:
            return out
        token_ids = token_ids.to(torch.int64).contiguous()
        slots = slots.to(torch.int32).contiguous()
        self._check(token_ids, slots)
        for block in self._blocks:
            block.draw_afresh()
        if self._buffers[0].shape[0] < batch:
            self._buffers = self._allocate(batch)
            self._scratch = self._allocate_scratch(batch)
        residual, normed, wide, narrow, steps, mixed = self._buffers
        arguments = table(
            batch, hidden, token_ids.data_ptr(), slots.data_ptr(), self._embedding.data_ptr(),
            KINDS[self._embedding.dtype], row_bytes(self._embedding), self._final_norm.data_ptr(),
            self._final_eps, out.data_ptr(), residual.data_ptr(), normed.data_ptr(), wide.data_ptr(),
            pointer_of(narrow), steps.data_ptr(), mixed.data_ptr(), self._scratch.data_ptr(),
            row_bytes(self._scratch), len(self._blocks), self._table.data_ptr(), 4 * self._widths[0],
            4 * self._widths[1], self._chunk_rows(hidden, batch), self._chunk_rows(self._widths[2], batch),
            self._pool.num_threads,
        )  # fmt: skip
        self._pool.run(self._job, arguments.numpy())
        return out


def build_decode_stack(
    weights: StackWeights, states: tuple[BlockState, ...], num_threads: int
) -> DecodeStack:
    """See :class:`recurra.ops.decode_stack.BuildDecodeStack`.

    Raises:
        ConfigError: weights or states in a dtype without kernels, or blocks of both families in one stack.
    """
    families = {type(block) for block in weights.blocks}
    if len(families) != 1:
        raise ConfigError(
            "blocks", sorted(f.__name__ for f in families), "the compiled CPU step takes one family.",
            "Use enforce_eager=True.",
        )  # fmt: skip
    job = address(mamba1_step if families == {Mamba1Weights} else mamba2_step)
    return CpuDecodeStack(weights, states, thread_pool(num_threads), job)
