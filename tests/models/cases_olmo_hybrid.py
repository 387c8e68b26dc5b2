"""OLMo Hybrid checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hybrid_cases import Case
from safetensors.torch import save_file

from checkpoints import read_tensors, write_hybrid

#: Tensors whose names are the same in every spelling.
_SPOILT = ("lm_head", "0.linear_attn.v_proj", "1.self_attn.k_norm", "0.linear_attn.A_log", "1.mlp.up_proj")


def write_saved(folder: Path, **overrides: Any) -> Path:
    """Two gated delta nets and an attention layer, as transformers saves them."""
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    sizes = {
        "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 52, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 10, "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    return write_hybrid(folder, OlmoHybridConfig, OlmoHybridForCausalLM, sizes | overrides)


def write(folder: Path, **overrides: Any) -> Path:
    """The same with filters apart, as published."""
    write_saved(folder, **overrides)
    config = json.loads((folder / "config.json").read_text())
    _split_filters(folder, config["linear_num_key_heads"] * config["linear_key_head_dim"])
    return folder


def _split_filters(folder: Path, keys: int) -> None:
    """transformers 5.24 cuts the filters of q, k and v into thirds when it saves, whatever their sizes."""
    tensors = read_tensors(folder)
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", part) for part in ("q_conv1d", "k_conv1d", "v_conv1d")]
        joined = torch.cat([tensors[n] for n in names])
        cut = joined.split([keys, keys, joined.shape[0] - 2 * keys])
        tensors |= {n: t.clone() for n, t in zip(names, cut, strict=True)}
    save_file(tensors, folder / "model.safetensors")


CASES = {
    "olmo_hybrid": Case(write, tensors=_SPOILT),
    "olmo_hybrid-saved": Case(write_saved, tensors=(*_SPOILT, "0.linear_attn.k_conv1d")),
    "olmo_hybrid-no-positions": Case(
        lambda folder: write(
            folder, attention_bias=True, tie_word_embeddings=True, linear_allow_neg_eigval=False,
            linear_num_value_heads=2, linear_value_head_dim=None, linear_conv_kernel_dim=3, num_key_value_heads=None,
            rope_parameters={"rope_type": "default", "rope_theta": None}, layer_types=None,
        ),
        tensors=("0.linear_attn.v_proj", "2.self_attn.k_norm", "0.linear_attn.A_log"),
    ),
}  # fmt: skip
