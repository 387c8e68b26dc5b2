"""Points a loaded transformers model at these operators.

>>> undo = use_recurra(model)
>>> with torch.no_grad(): model.generate(...)
>>> undo()

transformers' recurrent mixers call their operators as functions of the module they are written in. Each mixer's
methods are bound anew, to itself alone, with those names leading here; nothing of transformers is changed for other
models, and nothing is copied but code objects.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.conv import causal_conv1d_fn, causal_conv1d_update
from recurra.ops.compat.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from recurra.ops.compat.ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update


def _only_known(function: Callable[..., Any]) -> Callable[..., Any]:
    """transformers passes its own keyword arguments along; those that the operator doesn't have are dropped, as its
    own dispatch does."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call


#: Names in transformers' modules, and what serves them.
OPERATORS: dict[str, Callable[..., Any]] = {
    name: _only_known(function)
    for name, function in (
        ("causal_conv1d_fn", causal_conv1d_fn),
        ("causal_conv1d_update", causal_conv1d_update),
        ("mamba_selective_scan", selective_scan_fn),
        ("mamba_selective_state_update", selective_state_update),
        ("mamba2_chunk_scan", mamba_chunk_scan_combined),
        ("mamba2_selective_state_update", selective_state_update),
        ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
        ("torch_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule),
    )
}


def _names(function: FunctionType) -> set[str]:
    return set(function.__code__.co_names)


def _redirected(function: FunctionType, served: dict[str, Callable[..., Any]]) -> FunctionType:
    """The same code, with the operators' names leading here."""
    copy = FunctionType(
        function.__code__, {**function.__globals__, **served}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _methods(module: nn.Module) -> dict[str, FunctionType]:
    """Methods that call an operator, by name, without the decorators around them."""
    home = vars(sys.modules[type(module).__module__])
    found = {}
    for name, method in inspect.getmembers(type(module), inspect.isfunction):
        inner = inspect.unwrap(method)
        if isinstance(inner, FunctionType) and any(n in home for n in _names(inner) & OPERATORS.keys()):
            found[name] = inner
    return found


def use_recurra(model: nn.Module) -> Callable[[], None]:
    """Let the recurrent mixers of a transformers model, or of a part of one, run on these operators.

    Mamba, Mamba-2, FalconMamba, Jamba, Bamba, Zamba2, Nemotron-H, Granite-4, Falcon-H1, LFM2, Qwen3-Next and others
    whose modules name their operators alike. The model must run without gradients.

    Args:
        model: any module; it stays where it is.

    Returns:
        a function without arguments that undoes it.

    Raises:
        RefusedArgumentError: no module in it calls an operator that is served here, or accelerate offloads it.
    """
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise RefusedArgumentError(
            "use_recurra",
            "model",
            "accelerate moves its weights while it runs.",
            "Load it whole on one device.",
        )
    changed: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, method in _methods(module).items():
            served = {n: OPERATORS[n] for n in _names(method) & OPERATORS.keys()}
            module.__dict__[name] = MethodType(_redirected(method, served), module)
            changed.append((module, name))
    if not changed:
        raise RefusedArgumentError(
            "use_recurra", "model", f"nothing in this {type(model).__name__} calls a recurrent operator by a known name.",
            f"Names served: {', '.join(OPERATORS)}, as transformers has them from 5.20 on.",
        )  # fmt: skip

    def undo() -> None:
        for module, name in changed:
            module.__dict__.pop(name, None)

    return undo
