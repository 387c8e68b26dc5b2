"""How a checkpoint's weights are quantised: what its configuration says, and how numbers come back from what is stored.

    weight = (stored - zero point) * scale

with one scale a tensor, a row, a group of a row's columns, or a block of rows and columns. Three ways to say so are
read: ``fp8`` (DeepSeek's and Qwen's blocks with ``weight_scale_inv``, or a scale a tensor), ``fbgemm_fp8`` (a scale a
row) and ``compressed-tensors`` (fp8, int8, and packed integers of 4 or 8 bits). All of them describe activations too;
here activations are quantised only where the
hardware multiplies float8 with nothing else, and only if the checkpoint is made for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recurra.models.config import Fields

Strategy = Literal["tensor", "channel", "group", "block"]

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
#: Ways of compressed-tensors to store weights; "dense" is not at all.
FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "dense",
)
_STRATEGIES: tuple[Strategy, ...] = ("tensor", "channel", "group", "block")
_WORD = 32  # bits of a word of packed integers


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some of the weights are stored.

    Attributes:
        kind: "float" (8 bits) or "int".
        bits: of a number.
        strategy: what shares a scale.
        size: rows and columns that share a scale, for groups and blocks; 0 elsewhere.
        activations: whether the checkpoint is made for activations in the same format.
    """

    kind: Literal["float", "int"]
    bits: int
    strategy: Strategy
    size: tuple[int, int] = (0, 0)
    activations: bool = False

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that scales of a weight (..., rows, columns) may have; the first is the usual one."""
        *several, rows, columns = shape
        if self.strategy == "tensor":
            one = ((), (1,), (1, 1)) if not several else ()
            return (*one, tuple(several), (*several, 1), (*several, 1, 1))
        if self.strategy == "channel":
            return ((*several, rows, 1), (*several, rows))
        by_rows, by_columns = self.size
        return ((*several, -(-rows // by_rows), -(-columns // by_columns)),)

    def __str__(self) -> str:
        shared = {
            "tensor": "a scale a tensor", "channel": "a scale a row",
            "group": f"a scale for {self.size[1]} columns of a row",
            "block": f"a scale for {self.size[0]} rows and {self.size[1]} columns",
        }  # fmt: skip
        return f"{self.kind} of {self.bits} bits with {shared[self.strategy]}"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a configuration says of its weights: a method of :data:`METHODS`, and the schemes that they may have."""

    method: str
    schemes: tuple[Scheme, ...]


def read_quantisation(fields: Fields) -> Quantisation | None:
    """From ``quantization_config`` (``compression_config`` in older files); None where weights are plain.

    Raises:
        CheckpointError: a method, format or scheme that isn't known.
    """
    key = "quantization_config" if fields.raw.get("quantization_config") else "compression_config"
    how = fields.section(key)
    if not how.raw:
        return None
    method = str(how.raw.get("quant_method"))
    if method not in METHODS:
        raise how.wrong("quant_method", f"unknown in {key}. Known: {', '.join(METHODS)}.")
    if method == "compressed-tensors":
        return Quantisation(method, _compressed(how))
    if method == "fbgemm_fp8":
        return Quantisation(method, (Scheme("float", 8, "channel", activations=True),))
    size = how.raw.get("weight_block_size")
    if size is None:
        shared: tuple[Strategy, ...] = ("tensor", "channel")
        return Quantisation(
            method, tuple(Scheme("float", 8, strategy, activations=True) for strategy in shared)
        )
    block = _block(how, "weight_block_size")
    return Quantisation(method, (Scheme("float", 8, "block", block, activations=True),))


def _compressed(how: Fields) -> tuple[Scheme, ...]:
    named = how.raw.get("format", "dense")
    if named not in FORMATS:
        raise how.wrong("format", f"unknown. Known: {', '.join(FORMATS)}.")
    if how.section("sparsity_config").raw.get("format", "dense") != "dense":
        raise how.wrong("sparsity_config", "sparse weights aren't read; it works with format='dense'.")
    if how.section("transform_config").raw.get("config_groups"):
        raise how.wrong("transform_config", "rotated activations aren't supported; it works without.")
    groups = how.section("config_groups")
    return tuple(dict.fromkeys(_scheme(groups.section(name)) for name in groups.raw))


def _scheme(group: Fields) -> Scheme:
    """The weights' part of one of the ``config_groups``."""
    weights = group.section("weights")
    kind, bits = weights.raw.get("type", "int"), weights.whole("num_bits", 8)
    strategy = weights.raw.get("strategy") or ("group" if weights.raw.get("group_size") else "tensor")
    if strategy not in _STRATEGIES:
        raise weights.wrong("strategy", f"unknown. Known: {', '.join(_STRATEGIES)}.")
    if kind not in ("int", "float") or bits not in ((8,) if kind == "float" else (4, 8)):
        raise weights.wrong("num_bits", f"no {kind!r} of so many bits. Known: float of 8, int of 4 and of 8.")
    size = (0, 0)
    if strategy == "group":
        size = (1, weights.whole("group_size"))
    elif strategy == "block":
        size = _block(weights, "block_structure")
    activations = group.section("input_activations").raw
    alike = (activations.get("type"), activations.get("num_bits")) == (kind, bits)
    return Scheme(kind, bits, strategy, size, alike)


def _block(fields: Fields, key: str) -> tuple[int, int]:
    value: Any = fields.raw.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise fields.wrong(key, "must be two whole numbers, rows and columns of a block.")
    return value[0], value[1]


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Integers of ``bits`` bits from words of 32: (..., words) int32 to (..., columns) int8.

    The first number is in the lowest bits, and each is stored as what it is more than the least one, -2^(bits - 1).
    """
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    apart = (packed[..., None] >> shifts) & (2**bits - 1)
    whole: Tensor = apart.flatten(-2)[..., :columns] - 2 ** (bits - 1)
    return whole.to(torch.int8)


def packed_columns(columns: int, bits: int) -> int:
    """Words of a row of so many columns."""
    return -(-columns * bits // _WORD)


def spread(scale: Tensor, shape: tuple[int, ...], scheme: Scheme, group_of: Tensor | None = None) -> Tensor:
    """Scales (or zero points), of one of ``scheme.scale_shapes(shape)``, as something that broadcasts to ``shape``.

    Args:
        group_of: (columns,) the group of each column, where groups aren't neighbours.
    """
    several, (rows, columns) = shape[:-2], shape[-2:]
    if scheme.strategy == "tensor":
        return scale.reshape(*(several if scale.numel() > 1 else ()), 1, 1)
    if scheme.strategy == "channel":
        return scale.reshape(*several, rows, 1)
    by_rows, by_columns = scheme.size
    if group_of is not None:
        return scale[..., group_of.long()]
    tall: Tensor = scale.repeat_interleave(by_rows, -2)[..., :rows, :]
    wide: Tensor = tall.repeat_interleave(by_columns, -1)[..., :columns]
    return wide


def dequantise(stored: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Float32 weights from stored numbers, scales and zero points that broadcast to them."""
    wide = stored.float()
    if zero_point is not None:
        wide = wide - zero_point.float()
    return wide * scale.float()
