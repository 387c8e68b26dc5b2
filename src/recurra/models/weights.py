"""Weights from files into parameters, one tensor at a time, checked against the model before any is read.

A family describes its checkpoint as data: a tuple of :class:`Entry`. Everything else is here: finding
files, checking names and shapes, converting number formats while copying, and drawing dummy weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.errors import CheckpointError
from recurra.models.files import Stored, WeightFiles

#: Called with what is going on, bytes done and bytes in all.
Progress = Callable[[str, int, int], None]

#: Layer number, and an expert's, in a name.
LAYER, EXPERT = "{i}", "{e}"

_SHOWN = 8  # names in a complaint


def as_is(value: Tensor) -> Tensor:
    """The stored tensor is the parameter."""
    return value


def negative_exp(value: Tensor) -> Tensor:
    """A = -exp(A_log), in float32 at least: in 16 bits the decay would be wrong by percents."""
    wide = value if value.dtype == torch.float64 else value.float()
    return -torch.exp(wide)


def one_plus(value: Tensor) -> Tensor:
    """Weights of norms that multiply by ``1 + w``, in float32 at least: 16 bits would round the sum."""
    return 1.0 + (value if value.dtype == torch.float64 else value.float())


def filters(value: Tensor) -> Tensor:
    """Depthwise filters (channels, 1, W), or (channels, W, 1) in some exports, to (channels, W)."""
    if value.dim() == 3 and value.shape[1] == 1:
        return value.squeeze(1)
    if value.dim() == 3 and value.shape[2] == 1:
        return value.squeeze(2)
    return value


def draw_matrix(value: Tensor, generator: torch.Generator) -> None:
    """Normal, scaled so that a product keeps its input's size."""
    value.normal_(0.0, value.shape[-1] ** -0.5, generator=generator)


def draw_zeros(value: Tensor, generator: torch.Generator) -> None:
    """Zeros, for biases."""
    value.zero_()


def draw_ones(value: Tensor, generator: torch.Generator) -> None:
    """Ones, for norms and skips."""
    value.fill_(1.0)


def draw_steps(value: Tensor, generator: torch.Generator) -> None:
    """Biases whose softplus, the step dt, is spread from 0.001 to 0.1 on a logarithmic scale."""
    steps = torch.empty_like(value).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    value.copy_(steps + torch.log(-torch.expm1(-steps)))


def whole(parameter: Tensor) -> Tensor:
    """A stored tensor that fills its parameter (or an expert's part of it) alone."""
    return parameter


@dataclass(frozen=True, slots=True)
class Rows:
    """The part of a parameter that a stored tensor fills: ``count`` rows from ``first`` on, of those it shares."""

    first: int
    count: int

    def __call__(self, parameter: Tensor) -> Tensor:
        return parameter[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor (or one of every layer, or of every expert) of a checkpoint and the parameter that it becomes.

    Attributes:
        stored: name in the checkpoint; ``{i}`` stands for the layer's number and ``{e}`` for an expert's.
        target: path of the parameter in the model, likewise with ``{i}``; where ``stored`` has ``{e}``, the
            parameter's first dimension counts the experts. An entry whose parameter the model lacks (a
            bias that the configuration switches off, a mixer of another kind) doesn't apply.
        convert: from the stored tensor to the part's values and shape.
        draw: fills the part in place with dummy values of the usual scale.
        part: where several stored tensors share a parameter, the part that is this one's.
    """

    stored: str
    target: str
    convert: Callable[[Tensor], Tensor] = as_is
    draw: Callable[[Tensor, torch.Generator], None] = draw_matrix
    part: Callable[[Tensor], Tensor] = whole

    def layers(self, count: int) -> Iterable[tuple[str, str]]:
        """(stored name, parameter path) of each layer, or the one pair of a tensor outside layers."""
        numbers = range(count) if LAYER in self.stored else range(1)
        for i in numbers:
            yield self.stored.replace(LAYER, str(i)), self.target.replace(LAYER, str(i))

    def parts(self, stored: str, parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
        """(stored name, the part that it fills) of each expert, or the one pair."""
        if EXPERT not in stored:
            yield stored, self.part(parameter)
        else:
            for e in range(parameter.shape[0]):
                yield stored.replace(EXPERT, str(e)), self.part(parameter[e])


@dataclass(frozen=True, slots=True)
class Either:
    """Several ways in which checkpoints store the same parameters.

    ``forms``: a checkpoint map each. That one is used of which a checkpoint has a tensor, with as many rows as its
    :class:`Rows` say if several forms have the same names; the first if it has none, or if there is no checkpoint.
    """

    forms: tuple[tuple[Entry, ...], ...]


#: A checkpoint map.
Map = tuple[Entry | Either, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    entry: Entry
    parameter: Tensor  # or the part of it


def _plan(model: nn.Module, entries: Map, num_layers: int, stored: Mapping[str, Stored]) -> dict[str, _Load]:
    """Checkpoint name to what it fills; every value of every parameter is filled once."""
    parameters = {name: p.data for name, p in model.named_parameters()}
    unfilled = {name: p.numel() for name, p in parameters.items()}
    plan: dict[str, _Load] = {}
    for entry in settled(entries, num_layers, stored):
        for name, target in entry.layers(num_layers):
            for one, part in entry.parts(name, parameters[target]) if target in parameters else ():
                assert one not in plan, f"two entries for {one}"
                plan[one] = _Load(entry, part)
                unfilled[target] -= part.numel()
    left = {name: count for name, count in unfilled.items() if count}
    assert not left, f"the checkpoint map fills too little or too much of {left}"
    return plan


def settled(entries: Map, num_layers: int, stored: Mapping[str, Stored]) -> Iterable[Entry]:
    """The map with each choice made."""

    def found(form: tuple[Entry, ...]) -> list[tuple[Entry, Stored]]:
        named = ((entry, name.replace(EXPERT, "0")) for entry in form for name, _ in entry.layers(num_layers))
        return [(entry, stored[name]) for entry, name in named if name in stored]

    def fits(form: tuple[Entry, ...]) -> bool:
        return all(
            tensor.shape[:1] == (entry.part.count,)
            for entry, tensor in found(form)
            if isinstance(entry.part, Rows)
        )

    for entry in entries:
        if isinstance(entry, Either):
            present = [form for form in entry.forms if found(form)] or [entry.forms[0]]
            yield from next(filter(fits, present), present[0])
        else:
            yield entry


def load(
    model: nn.Module,
    entries: Map,
    num_layers: int,
    files: WeightFiles,
    tied: tuple[str, str] | None,
    progress: Progress | None,
) -> None:
    """Fill every parameter of ``model`` from ``files``.

    Args:
        entries: the family's checkpoint map.
        num_layers: blocks of the model.
        files: the folder's tensors.
        tied: (name, other name): the first may be stored too, and must then equal the second.
        progress: told after each tensor.

    Raises:
        CheckpointError: a tensor is missing, left over, misshapen, of a format that isn't a plain float,
            or unreadable; nothing was loaded if names, shapes or formats are at fault.
    """
    plan = _plan(model, entries, num_layers, files.tensors)
    extra_copy = tied[0] if tied is not None and tied[0] in files.tensors else None
    _check(plan, files, extra_copy)
    total = sum(files.tensors[name].nbytes for name in plan)
    done = 0
    for name in files.in_file_order(plan):
        load_ = plan[name]
        value = load_.entry.convert(files.read(name))
        with torch.no_grad():
            load_.parameter.copy_(value)
        done += files.tensors[name].nbytes
        if progress is not None:
            progress("loading weights", done, total)
    if tied is not None and extra_copy is not None:
        _check_tied(files, *tied)


def draw(
    model: nn.Module,
    entries: Map,
    num_layers: int,
    seed: int,
    progress: Progress | None,
) -> None:
    """Fill every parameter with dummy values of the usual scale; the same ones for the same seed and device."""
    plan = _plan(model, entries, num_layers, {})
    total = sum(load_.parameter.nbytes for load_ in plan.values())
    done = 0
    generators: dict[torch.device, torch.Generator] = {}
    for load_ in plan.values():
        device = load_.parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            load_.entry.draw(load_.parameter, generators[device])
        done += load_.parameter.nbytes
        if progress is not None:
            progress("drawing dummy weights", done, total)


def _check(plan: dict[str, _Load], files: WeightFiles, extra_copy: str | None) -> None:
    """Compare names, formats and shapes; only the files' headers are read."""
    complaints = []
    missing = [name for name in plan if name not in files.tensors]
    extra = [name for name in files.tensors if name not in plan and name != extra_copy]
    if missing:
        complaints.append(f"missing: {_some(missing)}")
    if extra:
        complaints.append(f"left over, used by nothing: {_some(extra)}")
    for name, load_ in plan.items():
        if name in files.tensors:
            complaints.extend(_misfit(name, files.tensors[name], load_))
    if complaints:
        listed = "; ".join(complaints[: _SHOWN + 2])
        raise CheckpointError(f"the weights in {files.folder} don't fit their configuration: {listed}")


def _misfit(name: str, stored: Stored, load_: _Load) -> list[str]:
    if stored.dtype not in (*FLOATS, load_.parameter.dtype):
        return [f"{name} is stored as {stored.dtype}, and only plain floats are read (no quantised weights)"]
    want = tuple(load_.parameter.shape)
    if tuple(load_.entry.convert(torch.empty(stored.shape, device="meta")).shape) != want:
        return [f"{name} in {stored.file.name} has shape {list(stored.shape)} where {list(want)} is expected"]
    return []


def _check_tied(files: WeightFiles, name: str, other: str) -> None:
    """Two stored copies of a tied table must agree, or one of them would be ignored in silence."""
    one, two = files.read(name), files.read(other)
    if one.shape != two.shape or not torch.equal(one, two):
        raise CheckpointError(
            f"{files.folder}: the configuration ties {name} to {other}, but the two stored tensors differ;"
            " set tie_word_embeddings (tie_embeddings) to false in the configuration to use both."
        )


def _some(names: list[str]) -> str:
    listed = ", ".join(sorted(names)[:_SHOWN])
    return listed if len(names) <= _SHOWN else f"{listed} and {len(names) - _SHOWN} more"


#: Formats that convert to any other by copying.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
