"""One decode step with several tokens a sequence: verifying a guess of a few tokens, and keeping what a guess
that turns out wrong must be taken back to.

The step's tokens are packed, sequence after sequence. A sequence may read its memory in one slot and write it to
others. The recurrences are those of :mod:`recurra.ops.conv1d` and :mod:`recurra.ops.ssm`; the lean one-token
operators there are what an engine calls when every sequence has one token and one slot.

A negative slot is padding everywhere; so is ``pad_slot``, slot 0 unless another is named. Padding sequences are
neither read nor written, and their outputs are zeros.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding
from recurra.types import SCRATCH_SLOT


class CausalConv1dUpdateVarlen(Protocol):
    """Convolve a few new tokens of each sequence, moving its window on.

    A window of ``L >= W - 1`` inputs is kept, any strides, so both (slots, channels, L) and the transposed view of
    (slots, L, channels) will do. What the window holds depends on ``accepted``:

    * None: the last L inputs, the newest last. The step appends its n tokens and drops as many from the front.
    * (S,) int32: the window's front holds ``W - 2`` inputs, then the tokens of the *previous* step, of which
      the first ``accepted[s]`` count (1 or more). The step's own window is the W - 1 inputs that end with the
      last accepted token; afterwards the front holds the last W - 2 of those and the step's n tokens, so that the
      next step can take back any of them. Needs ``L >= W - 2 + n``; what lies behind is left as it is.

    Args:
        x: (T, channels), any row stride, unit channel stride.
        weight: (channels, W), W from 2 to 5. bias: (channels,) or None.
        conv_state: (slots, channels, L), **written in place** for ``targets``.
        cu_seqlens: (S + 1,) int32, bounds of the sequences in x. Empty sequences change nothing.
        sources: (S,) int32, slots that windows are read from.
        targets: (S,) int32, slots that they are written to; the same tensor to stay in place. No slot may be
            another sequence's source.
        silu: apply x * sigmoid(x) to the result.

    Returns:
        (T, channels) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        cu_seqlens: Tensor,
        sources: Tensor,
        targets: Tensor,
        accepted: Tensor | None,
        *,
        silu: bool,
        pad_slot: int = SCRATCH_SLOT,
    ) -> Tensor: ...


class SelectiveStateUpdateVarlen(Protocol):
    """A few steps of the recurrence for each sequence, with the state after any of them kept.

    Args:
        ssm_state, x, dt, A, B, C, D, z, dt_bias: as in :class:`recurra.ops.ssm.SelectiveStateUpdate`, in either
            of its forms, with a row of x, dt, B, C and z for each of the T tokens.
        cu_seqlens: (S + 1,) int32, bounds of the sequences in x.
        sources: (S,) int32, slots that states are read from.
        targets: (S, J) int32, J at least the longest sequence's tokens: after token j the state is written to slot
            ``targets[s, j]``, unless that is padding. No slot may be another sequence's source.
        dt_softplus, dt_limit, state_scale, rounding: as in :class:`recurra.ops.ssm.SelectiveStateUpdate`; the state
            stays in float32 between the step's tokens, and is rounded where it is written.

    Returns:
        like x.
    """

    def __call__(
        self,
        ssm_state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor,
        sources: Tensor,
        targets: Tensor,
        *,
        dt_softplus: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        pad_slot: int = SCRATCH_SLOT,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...
