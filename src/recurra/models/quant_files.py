"""Weight files with quantised tensors, seen as if they weren't: a weight and its scales are one tensor of floats.

So every checkpoint map serves quantised checkpoints too, and loading stays as strict: a weight without its scales,
scales without a weight, and scales of a wrong shape are errors that name them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recurra.errors import CheckpointError
from recurra.models.files import Stored, WeightFiles
from recurra.models.quant import Quantisation, Scheme, dequantise, packed_columns, spread, unpack

#: safetensors' names of the formats of quantised numbers.
_FLOAT8, _INT8, _INT32 = ("F8_E4M3", "F8_E5M2"), "I8", "I32"
_SCALES = ("_scale_inv", "_scale")
#: What belongs to a weight ``name``: ``name`` + one of these.
_PACKED, _SHAPE, _ZERO, _GROUPS = "_packed", "_shape", "_zero_point", "_g_idx"
#: Endings of names of what describes activations; weights don't need it.
_ACTIVATIONS = (
    ".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale",
    ".input_scale_ub", ".activation_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight in pieces.

    Attributes:
        scheme: how it is stored.
        shape: of the weight.
        numbers, scale: names in the files; zero_point, groups: likewise, where there are any.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    numbers: str
    scale: str
    zero_point: str | None = None
    groups: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Every piece's name."""
        return tuple(name for name in (self.numbers, self.scale, self.zero_point, self.groups) if name)


class QuantisedFiles(WeightFiles):
    """See :class:`WeightFiles`; ``tensors`` has a float32 entry for each quantised weight, and none for its pieces.

    Raises:
        CheckpointError: pieces missing or misshapen.
    """

    def __init__(
        self,
        folder: Path,
        files: list[Path],
        renames: tuple[tuple[str, str], ...],
        skips: tuple[str, ...],
        quantisation: Quantisation,
    ) -> None:
        super().__init__(folder, files, renames, skips)
        self._pieces = {n: s for n, s in self.tensors.items() if not n.endswith(_ACTIVATIONS)}
        self._quantisation = quantisation
        self.quantised: dict[str, Quantised] = {}
        self._afar: dict[str, Tensor] = {}
        self._kept: dict[str, str] = {}  # name of a kept weight's scales to the weight's
        for name in list(self._pieces):
            weight = name.removesuffix(_PACKED)
            if name != weight or self._pieces[name].dtype in (*_FLOAT8, _INT8):
                if name.endswith(_ZERO):
                    continue  # zero points are int8 beside int8 weights
                self.quantised[weight] = self._gather(weight, name)
        taken = {part for q in self.quantised.values() for part in q.parts}
        taken |= {name + _SHAPE for name in self.quantised}
        self.tensors = {n: s for n, s in self._pieces.items() if n not in taken}
        for name, q in self.quantised.items():
            numbers, nbytes = self._pieces[q.numbers], sum(self._pieces[part].nbytes for part in q.parts)
            self.tensors[name] = Stored(numbers.file, name, q.shape, torch.float32, nbytes)
        self._afar.update({part: self._piece(part) for part in self._pieces_afar()})

    def describe(self) -> str:
        """What is stored how, and what stays so: "24 weights are float of 8 bits with a scale a row, 20 stay so"."""
        counts = Counter(str(q.scheme) for q in self.quantised.values())
        stored = ", ".join(f"{count} weights are {scheme}" for scheme, count in counts.items())
        return f"{stored or 'no weight is quantised'}, {len(self._kept)} stay so"

    def can_keep(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a weight can be read as numbers of ``dtype`` and scales (rows, 1)."""
        q = self.quantised.get(name)
        if q is None or q.zero_point or q.scheme.bits != 8 or q.scheme.strategy not in ("tensor", "channel"):
            return False
        if len(q.shape) != 2:
            return False
        if dtype == torch.int8:
            return q.scheme.kind == "int"
        return self._pieces[q.numbers].dtype == _FLOAT8[0] and q.scheme.activations

    def keep(self, name: str, dtype: torch.dtype) -> str:
        """Read a weight as numbers of ``dtype`` from now on; returns the name under which its scales are read."""
        q, scale = self.quantised[name], name + _SCALES[1]
        numbers, scales = self._pieces[q.numbers], self._pieces[q.scale]
        self.tensors[name] = Stored(numbers.file, name, q.shape, dtype, numbers.nbytes)
        self.tensors[scale] = Stored(numbers.file, scale, (q.shape[0], 1), torch.float32, scales.nbytes)
        self._kept[scale] = name
        return scale

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU: as stored, or in float32 where it is quantised and not kept."""
        if name in self._kept:
            q = self.quantised[self._kept[name]]
            return spread(self._piece(q.scale), q.shape, q.scheme).float().expand(q.shape[0], 1)
        if name not in self.quantised:
            return super().read(name)
        if self.tensors[name].dtype != torch.float32:
            return self.read_parts(name)[0]
        q = self.quantised[name]
        numbers, scale, zero_point = self.read_parts(name)
        groups = None if q.groups is None else self._piece(q.groups)
        zero = None if zero_point is None else spread(zero_point, q.shape, q.scheme)
        return dequantise(numbers, spread(scale, q.shape, q.scheme, groups), zero)

    def read_parts(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """A quantised weight's numbers (unpacked), scales and zero points as they are."""
        q = self.quantised[name]
        numbers = self._piece(q.numbers)
        zero = None if q.zero_point is None else self._piece(q.zero_point)
        if self._packed(q):
            numbers = unpack(numbers, q.scheme.bits, q.shape[-1])
            if zero is not None and zero.dtype == torch.int32:
                zero = unpack(zero.mT, q.scheme.bits, q.shape[-2]).mT  # packed down the rows
        return numbers, self._piece(q.scale), zero

    def _packed(self, q: Quantised) -> bool:
        return q.numbers.endswith(_PACKED)

    def _piece(self, name: str) -> Tensor:
        return self._afar[name] if name in self._afar else self.read_stored(self._pieces[name])

    def _pieces_afar(self) -> list[str]:
        """Small pieces in other files than their numbers: read first, so that files are still opened once each."""
        afar = [
            part
            for q in self.quantised.values()
            for part in q.parts[1:]
            if self._pieces[part].file != self._pieces[q.numbers].file
        ]
        return sorted(afar, key=lambda part: self.files.index(self._pieces[part].file))

    def _gather(self, weight: str, numbers: str) -> Quantised:
        scale = next((weight + end for end in _SCALES if weight + end in self._pieces), None)
        if scale is None:
            raise self._fault(f"{numbers} has no scales: {weight}_scale is missing")
        shape = self._shape(weight, numbers)
        scheme = self._scheme(weight, numbers, scale, shape)
        zero, groups = (weight + end if weight + end in self._pieces else None for end in (_ZERO, _GROUPS))
        if zero is not None and numbers == weight:
            self._same_shape(zero, scale)
        return Quantised(scheme, shape, numbers, scale, zero, groups)

    def _shape(self, weight: str, numbers: str) -> tuple[int, ...]:
        if numbers == weight:
            return self._pieces[weight].shape
        if weight + _SHAPE not in self._pieces:
            raise self._fault(f"{numbers} has no shape: {weight}{_SHAPE} is missing")
        return tuple(self._piece(weight + _SHAPE).tolist())

    def _scheme(self, weight: str, numbers: str, scale: str, shape: tuple[int, ...]) -> Scheme:
        stored, found = self._pieces[numbers], self._pieces[scale].shape
        if len(shape) < 2:
            raise self._fault(f"{numbers} has shape {list(shape)}, and only matrices are quantised")
        fitting = [s for s in self._quantisation.schemes if _fits(s, stored, shape)]
        if not fitting:
            offered = "; ".join(map(str, self._quantisation.schemes)) or "nothing"
            raise self._fault(
                f"{numbers} is stored as {stored.dtype} {list(stored.shape)}, and the configuration offers {offered}"
            )
        for scheme in fitting:
            if found in scheme.scale_shapes(shape):
                return scheme
        wanted = " or ".join(str(list(s.scale_shapes(shape)[0])) for s in fitting)
        raise self._fault(
            f"{scale} has shape {list(found)} where {wanted} is expected for {weight} {list(shape)}"
        )

    def _same_shape(self, name: str, other: str) -> None:
        one, two = self._pieces[name].shape, self._pieces[other].shape
        if one != two:
            raise self._fault(f"{name} has shape {list(one)} where {list(two)} is expected, as {other} has")

    def _fault(self, problem: str) -> CheckpointError:
        return CheckpointError(f"the quantised weights in {self.folder}: {problem}.")


def _fits(scheme: Scheme, stored: Stored, shape: tuple[int, ...]) -> bool:
    """Whether a scheme may be that of stored numbers, but for the scales."""
    if stored.dtype in _FLOAT8:
        return scheme.kind == "float"
    if stored.dtype == _INT8:
        return scheme.kind == "int"
    words = (*shape[:-1], packed_columns(shape[-1], scheme.bits))
    return stored.dtype == _INT32 and scheme.kind == "int" and stored.shape == words
