"""Mamba-2's update without writing states: a checkpoint, and the inputs since.

After i inputs beyond a checkpoint S0, with step sizes dt, decays a_j = exp(dt_j A) and one decay a head, the
recurrence ``S = a S + dt x B`` unrolls to

    y_t = (prod_{j <= t} a_j) (C_t . S0) + sum_{i <= t} (prod_{i < j <= t} a_j) dt_i (C_t . B_i) x_i + D x_t

so a step may read S0 and the inputs and leave S0 alone. The products of decays are exponentials of sums, in
float32. Once in so many steps the inputs are *folded*: S0 becomes the state after all of them, and is rounded then and only
then. A state of P x N numbers a head is written once a fold instead of once a token, and what is kept is
P + N / (heads a group) + 1 numbers a token.

**The ring** has R places, of which ``L = R - window`` hold inputs between steps; ``window`` is the most tokens that a
sequence may have in one step. A step of n tokens that would make them more than L first folds all that are
there. New inputs go to the places behind the newest, never to one that the same step reads: programs of
one launch share the ring of B.

**Taking back** the newest inputs (guesses that verification refused) is lowering their number: ``rejected``. No state
was written for them, because a fold comes before the inputs of its own step.

Source: ReplaySSM (Dao lab, 2026), for the idea; the formula above.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recurra.ring import Ring
from recurra.rounding import NEAREST, Rounding

__all__ = ["ReplayFold", "ReplayStateUpdate", "Ring", "check_ring"]


def check_ring(ring: Ring, ssm_state: Tensor, window: int) -> int:
    """L, the inputs that stay between steps, of a ring that fits the states."""
    slots, heads, dim, state_size = ssm_state.shape
    places, groups = ring.B.shape[1:3]
    assert ring.x.shape == (slots, places, heads, dim), (ring.x.shape, ssm_state.shape)
    assert ring.dt.shape == (slots, places, heads), (ring.dt.shape, ssm_state.shape)
    assert ring.B.shape == (slots, places, groups, state_size), (ring.B.shape, ssm_state.shape)
    assert ring.at.shape == (slots, groups, 2), (ring.at.shape, ssm_state.shape)
    assert heads % groups == 0, (heads, groups)
    for name, tensor in ring._asdict().items():
        assert tensor[0].is_contiguous(), f"ring.{name}: strides {tensor.stride()}"
    assert 1 <= window < places, f"a ring of {places} places for {window} tokens a step"
    return places - window


class ReplayStateUpdate(Protocol):
    """One decode step: what :class:`recurra.ops.ssm.SelectiveStateUpdate` computes in its Mamba-2 form.

    Args:
        ssm_state: (slots, H, P, N), the checkpoints, **written in place** where a ring is folded.
        ring: see :class:`recurra.ring.Ring`, **written in place**.
        x, z: (T, H, P); dt: (T, H) before bias; B, C: (T, G, N); A, dt_bias: (H,); D: (H,) or (H, P).
        slots: (S,) int32; sequences of slot 0 are padding: nothing is read or written, their output is zero.
        cu_seqlens: (S + 1,) int32, bounds of the sequences in x, of at most min(window, L) tokens each;
            None: one token each. Empty sequences change nothing but what is taken back.
        rejected: (S,) int32, how many of the newest inputs in the ring are taken back first; None: none. No more
            than the last step brought.
        window: most tokens of a sequence in any step of this ring.
        dt_softplus, dt_limit, state_scale, rounding: as in the plain update; after a fold, outputs
            come from the state as it was rounded.

    Returns:
        like x.
    """

    def __call__(
        self,
        ssm_state: Tensor,
        ring: Ring,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        slots: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        rejected: Tensor | None = None,
        window: int = 1,
        dt_softplus: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> Tensor: ...


class ReplayFold(Protocol):
    """Bring checkpoints up to date and empty the rings, before something else reads or replaces the states.

    Args:
        slots: (S,) int32; slot 0 is left alone.
        has_state: (S,) bool. Where False, the state and the ring's content may be anything: nothing is
            read, and the ring is made empty.
    """

    def __call__(
        self,
        ssm_state: Tensor,
        ring: Ring,
        A: Tensor,
        slots: Tensor,
        has_state: Tensor,
        *,
        state_scale: Tensor | None = None,
        rounding: Rounding = NEAREST,
    ) -> None: ...
