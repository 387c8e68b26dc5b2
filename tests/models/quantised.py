"""Quantised checkpoints, written from plain ones by loops over their numbers, with what they should be read as.

Written from the public descriptions of the formats, and independently of :mod:`recurra.models.quant`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: A weight's pieces by what is appended to its name (without ".weight"), and the weight that they stand for.
Made = tuple[dict[str, Tensor], Tensor]
FP8 = torch.float8_e4m3fn


def _eight(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    stored = (weight / scale).clamp(-448, 448).to(FP8)
    return stored, stored.float() * scale


def by_tensor(weight: Tensor) -> Made:
    scale = weight.abs().max() / 448
    stored, back = _eight(weight, scale)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, back


def by_row(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored, back = _eight(weight, scale)
    return {"weight": stored, "weight_scale": scale}, back


def by_block(weight: Tensor, tall: int = 16, wide: int = 12) -> Made:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // tall), -(-columns // wide))
    stored, back = torch.zeros_like(weight).to(FP8), torch.zeros_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide)
            scale[i, j] = weight[at].abs().max() / 448
            stored[at], back[at] = _eight(weight[at], scale[i, j])
    return {"weight": stored, "weight_scale_inv": scale}, back


def int8_by_row(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8_with_zero_points(weight: Tensor) -> Made:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().to(torch.int8)
    stored = (weight / scale + zero).round().clamp(-128, 127).to(torch.int8)
    pieces = {"weight": stored, "weight_scale": scale, "weight_zero_point": zero}
    return pieces, (stored.float() - zero.float()) * scale


def pack(values: Tensor, bits: int) -> Tensor:
    """Rows of whole numbers from -2^(bits - 1) on as rows of 32-bit words, lowest bits first."""
    each, rows = 32 // bits, []
    for row in (values.long() + 2 ** (bits - 1)).tolist():
        words = []
        for at in range(0, len(row), each):
            word = sum(value << (bits * i) for i, value in enumerate(row[at : at + each]))
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def int4_in_groups(weight: Tensor, group: int = 16, zeros: bool = False, shuffled: bool = False) -> Made:
    rows, columns = weight.shape
    groups = -(-columns // group)
    of = torch.arange(columns) // group
    if shuffled:
        of = of[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    scale, zero = torch.zeros(rows, groups), torch.zeros(rows, groups)
    for g in range(groups):
        part = weight[:, of == g]
        if zeros:
            scale[:, g] = (part.amax(1) - part.amin(1)).clamp(min=1e-4) / 15
            zero[:, g] = (-8 - part.amin(1) / scale[:, g]).round().clamp(-8, 7)
        else:
            scale[:, g] = part.abs().amax(1) / 7
    scale = scale.bfloat16().float()
    stored = (weight / scale[:, of] + zero[:, of]).round().clamp(-8, 7)
    pieces = {
        "weight_packed": pack(stored, 4), "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip
    if zeros:
        pieces["weight_zero_point"] = pack(zero.T, 4).T.contiguous()
    if shuffled:
        pieces["weight_g_idx"] = of.int()
    return pieces, (stored - zero[:, of]) * scale[:, of]


def int8_packed(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round()
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack(stored, 8), "weight_scale": scale, "weight_shape": shape}, stored * scale


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
_INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}

#: How a weight is stored, and what the configuration says of it.
WAYS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "fp8": (by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 blocks": (by_block, {"quant_method": "fp8", "weight_block_size": [16, 12]}),
    "fbgemm": (by_row, {"quant_method": "fbgemm_fp8"}),
    "float tensor": (
        by_tensor, _compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
    ),
    "float channel": (by_row, _compressed("float-quantized", type="float", num_bits=8, strategy="channel")),
    "int8": (int8_by_row, _compressed("int-quantized", **_INT8)),
    "int8 zero points": (int8_with_zero_points, _compressed("int-quantized", **_INT8, symmetric=False)),
    "int8 packed": (int8_packed, _compressed("pack-quantized", **_INT8)),
    "int4": (int4_in_groups, _compressed("pack-quantized", **_INT4)),
    "int4 zero points": (
        lambda w: int4_in_groups(w, zeros=True), _compressed("pack-quantized", **_INT4, symmetric=False),
    ),
    "int4 shuffled": (
        lambda w: int4_in_groups(w, shuffled=True), _compressed("pack-quantized", **_INT4, actorder="group"),
    ),
}  # fmt: skip


def _chosen(name: str, value: Tensor) -> bool:
    """Projections; not tables, norms and filters, and not the router, whose precision is its own."""
    outside = ("embed", "lm_head", "conv", "norm", "router", "gate.weight")
    return name.endswith(".weight") and value.dim() == 2 and not any(word in name for word in outside)


def quantise(source: Path, root: Path, way: str) -> tuple[Path, Path]:
    """Two folders beside each other: the quantised checkpoint, and a plain one with the weights it stands for."""
    make, config = WAYS[way]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if _chosen(name, value):
            pieces, plain[name] = make(value.float())
            stem = name.removesuffix("weight")
            stored |= {stem + end: piece.contiguous() for end, piece in pieces.items()}
        else:
            stored[name] = plain[name] = value
    assert len(stored) > len(plain), "nothing was quantised"
    for folder, tensors in ((root / "stored", stored), (root / "plain", plain)):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors")
    settings = json.loads((root / "stored" / "config.json").read_text())
    (root / "stored" / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return root / "stored", root / "plain"
