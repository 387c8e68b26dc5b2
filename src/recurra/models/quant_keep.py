"""Which quantised weights stay in 8 bits in memory: those of projections that the device multiplies as they are."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from recurra.layers.linear import Linear
from recurra.models.quant_files import QuantisedFiles
from recurra.models.weights import Entry, Map, Rows, as_is, settled, whole
from recurra.ops.linear import kept_dtype

_MULTIPLE = 16  # of rows and columns that GPUs multiply in 8 bits


def keep_narrow(
    model: nn.Module, entries: Map, num_layers: int, files: QuantisedFiles, act: torch.dtype
) -> tuple[Entry, ...]:
    """Make room for 8-bit weights in the projections that can have them, before anything is loaded.

    A projection can if all that fills it is stored in the device's 8-bit format with a scale a row or a tensor, and is
    copied as it is. The others will be filled with the numbers that theirs stand for.

    Args:
        entries: the family's checkpoint map.
        act: dtype of activations.

    Returns:
        entries of the scales, to be joined to the map.
    """
    sources: dict[str, list[tuple[str, Entry]]] = defaultdict(list)
    for entry in settled(entries, num_layers, files.tensors):
        for stored, target in entry.layers(num_layers):
            sources[target].append((stored, entry))
    scales: list[Entry] = []
    for path, module in model.named_modules():
        found = sources.get(f"{path}.weight")
        if not isinstance(module, Linear) or not found:
            continue
        dtype = kept_dtype(module.weight.device)
        if dtype is None or not _multiplies(module, dtype, act):
            continue
        if all(_as_it_is(entry) and files.can_keep(stored, dtype) for stored, entry in found):
            module.narrow(dtype)
            for stored, entry in found:
                scales.append(Entry(files.keep(stored, dtype), f"{path}.scale", part=entry.part))
    return tuple(scales)


def _multiplies(module: Linear, dtype: torch.dtype, act: torch.dtype) -> bool:
    if dtype == torch.int8:
        return True
    return act == torch.bfloat16 and all(size % _MULTIPLE == 0 for size in module.weight.shape)


def _as_it_is(entry: Entry) -> bool:
    return entry.convert is as_is and (entry.part is whole or isinstance(entry.part, Rows))
