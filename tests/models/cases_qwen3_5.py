"""Qwen3.5 checkpoints: text alone, and the text part of those that see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hybrid_cases import Case
from safetensors.torch import save_file

from checkpoints import read_tensors, write_hybrid

_SIZES: dict[str, Any] = {
    "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}  # fmt: skip


def write(folder: Path, **overrides: Any) -> Path:
    """Two gated delta nets and an attention layer, an MLP after each."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = _SIZES | {"intermediate_size": 52}
    return write_hybrid(folder, Qwen3_5TextConfig, Qwen3_5ForCausalLM, sizes | overrides)


def write_moe(folder: Path, **overrides: Any) -> Path:
    """The same with experts."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    sizes = _SIZES | _EXPERTS
    return write_hybrid(folder, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, sizes | overrides)


def write_seeing(folder: Path) -> Path:
    """Experts as published: below ``model.language_model``, stacked, beside a vision tower and a head that drafts."""
    write_moe(folder, rope_parameters=_ROPE, layer_types=None, full_attention_interval=3)
    tensors = {_published(name): t for name, t in read_tensors(folder).items()}
    for i in range(_SIZES["num_hidden_layers"]):
        _stack(tensors, f"model.language_model.layers.{i}.mlp.experts")
    tensors |= {
        "model.visual.blocks.0.norm1.weight": torch.ones(8),
        "mtp.layers.0.input_layernorm.weight": torch.ones(40),
    }
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": text, "tie_word_embeddings": False, "vision_config": {"depth": 1, "hidden_size": 8},
    }  # fmt: skip
    del text["layer_types"], text["architectures"]
    text["full_attention_interval"] = 3
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}  # fmt: skip


def _published(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def _stack(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Each layer's experts in two tensors."""

    def taken(name: str) -> torch.Tensor:
        return torch.stack(
            [tensors.pop(f"{prefix}.{e}.{name}.weight") for e in range(_EXPERTS["num_experts"])]
        )

    tensors[f"{prefix}.gate_up_proj"] = torch.cat((taken("gate_proj"), taken("up_proj")), dim=1)
    tensors[f"{prefix}.down_proj"] = taken("down_proj")


CASES = {
    "qwen3_5": Case(write),
    "qwen3_5-plain": Case(
        lambda folder: write(
            folder, attention_bias=True, tie_word_embeddings=True, linear_num_value_heads=2, linear_conv_kernel_dim=3
        )
    ),
    "qwen3_5_moe": Case(write_moe),
    "qwen3_5_moe-seeing": Case(write_seeing),
}  # fmt: skip
