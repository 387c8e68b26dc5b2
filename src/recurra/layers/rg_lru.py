"""Griffin's recurrent block: a convolution and a real-gated linear recurrent unit, beside a branch that gates them.

    y, x = in_proj(u)
    x    = conv1d(x)
    h    = rg_lru(x, gates of x)               (gates: products with the diagonal blocks of two matrices)
    out  = out_proj(h * act(y))

Source: Griffin (De et al., 2024), figure 2 and section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, rg_lru_state
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, parameter
from recurra.layers.linear import Linear
from recurra.ops import Ops
from recurra.ops.moe.activation import BY_NAME
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class RGLRUSizes:
    """Numbers of one block.

    Attributes:
        hidden: width of input and output.
        channels: of the recurrence.
        num_blocks: diagonal blocks of the gates' matrices; they divide the channels.
        conv_kernel: W.
        activation: of the branch beside the recurrence, a name of :data:`recurra.ops.moe.activation.BY_NAME`.
    """

    hidden: int
    channels: int
    num_blocks: int
    conv_kernel: int
    activation: str = "gelu_pytorch_tanh"

    @property
    def block_width(self) -> int:
        return self.channels // self.num_blocks


def negative_softplus_8(value: Tensor) -> Tensor:
    """The checkpoint's ``recurrent_param`` as log_decay, ``-8 softplus(param)``, in float32 at least."""
    return -8.0 * F.softplus(value if value.dtype == torch.float64 else value.float())


class BlockGates(nn.Module):
    """A product with a block-diagonal matrix: weight (blocks, inputs, outputs) and bias (blocks, outputs).

    They have the dtype of activations: a few megabytes, for which no product of narrower weights is worth it.
    """

    def __init__(self, sizes: RGLRUSizes, *, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        blocks, width = sizes.num_blocks, sizes.block_width
        self.weight = parameter(blocks, width, width, dtype=dtypes.act, device=device)
        self.bias = parameter(blocks, width, dtype=dtypes.act, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(T, channels) to the same."""
        blocks, width = self.bias.shape
        apart = x.view(-1, blocks, width).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], apart, self.weight).transpose(0, 1).reshape(x.shape)


class RGLRUMixer(nn.Module):
    """Mixes tokens over time with a real-gated recurrence (see :class:`recurra.layers.base.Mixer`).

    Parameters: in_proj (2 channels, hidden), the gating branch's rows first; conv1d; input_gate and recurrent_gate;
    log_decay (channels,) in float32 (from a checkpoint by :func:`negative_softplus_8`); out_proj (hidden, channels).
    """

    def __init__(self, sizes: RGLRUSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        assert sizes.channels % sizes.num_blocks == 0, sizes
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        self._act = BY_NAME[sizes.activation]
        hidden, channels = sizes.hidden, sizes.channels
        self.in_proj = Linear(hidden, 2 * channels, bias=True, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(channels, sizes.conv_kernel, bias=True, dtypes=dtypes, device=device)
        self.input_gate = BlockGates(sizes, dtypes=dtypes, device=device)
        self.recurrent_gate = BlockGates(sizes, dtypes=dtypes, device=device)
        self.log_decay = parameter(channels, dtype=dtypes.recurrence, device=device)
        self.out_proj = Linear(channels, hidden, bias=True, ops=ops, dtypes=dtypes, device=device)

    def state_spec(self) -> StateSpec:
        """Window (channels, W - 1) and state (blocks, channels / blocks) of one sequence."""
        s = self.sizes
        return rg_lru_state(
            s.num_blocks, s.block_width, s.conv_kernel, self._dtypes.conv_state, self._dtypes.ssm_state
        )

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        gate, u = self.in_proj(x).chunk(2, dim=-1)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv = self.conv1d
        u = self._ops.causal_conv1d_varlen(u, conv.weight, conv.bias, state.conv, *where, silu=False)
        h = self._ops.rg_lru_varlen(
            u, self.input_gate(u), self.recurrent_gate(u), self.log_decay, state.ssm, *where,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(h * self._act(gate))
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        gate, u = self.in_proj(x).chunk(2, dim=-1)
        slots, conv = batch.decode_slots, self.conv1d
        u = self._ops.causal_conv1d_update(u, conv.weight, conv.bias, state.conv, slots, silu=False)
        h = self._ops.rg_lru_update(
            state.ssm, u, self.input_gate(u), self.recurrent_gate(u), self.log_decay, slots,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(h * self._act(gate))
        return out
