"""Other libraries' operators under this project's signatures, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Peer:
    """A function of another library, and how its arguments follow from ours."""

    name: str
    operator: str
    module: str
    function: str
    call: Callable[..., Any]

    def load(self, operator: str) -> Callable[..., Any] | None:
        """Their function with our arguments; None if it is another operator's, or not installed."""
        if operator != self.operator or importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return None
        theirs = getattr(importlib.import_module(self.module), self.function)
        return lambda *arguments, **options: self.call(theirs, *arguments, **options)


def _state_update(theirs: Any, pool: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, bias: Any,
                  slots: Any) -> Any:  # fmt: skip
    _, heads, dim, size = pool.shape
    rates = A[:, None, None].expand(heads, dim, size)
    return theirs(
        pool, x, dt[:, :, None].expand(x.shape), rates, B, C, D[:, None].expand(heads, dim), z=z,
        dt_bias=bias[:, None].expand(heads, dim), dt_softplus=True, state_batch_indices=slots,
    )  # fmt: skip


def _conv_update(theirs: Any, x: Any, weight: Any, bias: Any, window: Any, slots: Any, *, silu: bool) -> Any:
    activation = "silu" if silu else None
    return theirs(x, window, weight, bias, activation=activation, conv_state_indices=slots)


PEERS = (
    Peer(
        "mamba_ssm", "selective_state_update", "mamba_ssm.ops.triton.selective_state_update",
        "selective_state_update", _state_update,
    ),
    Peer("causal_conv1d", "causal_conv1d_update", "causal_conv1d", "causal_conv1d_update", _conv_update),
)  # fmt: skip
