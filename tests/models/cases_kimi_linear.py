"""Kimi Linear checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hybrid_cases import Case
from safetensors.torch import save_file

from checkpoints import read_tensors, write_hybrid

#: Tensors whose names are the same in every spelling.
_SPOILT = (
    "lm_head",
    "0.self_attn.v_proj",
    "1.self_attn.kv_b_proj",
    "0.self_attn.A_log",
    "0.self_attn.f_b_proj",
)


def write(folder: Path, **overrides: Any) -> Path:
    """Two layers of Kimi delta attention and one of latent attention, experts in all but the first."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    sizes = {
        "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 52, "linear_num_heads": 3, "linear_head_dim": 12, "kv_lora_rank": 14,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9, "num_local_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    return write_hybrid(folder, KimiLinearConfig, KimiLinearForCausalLM, sizes | overrides)


def write_published(folder: Path) -> Path:
    """The published spelling: delta attention's numbers in a section, layers counted from one, MLPs called so."""
    write(folder)
    tensors = {
        re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name): t
        for name, t in read_tensors(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for key in (
        "layer_types",
        "mlp_layer_types",
        "linear_num_heads",
        "linear_head_dim",
        "linear_conv_kernel_dim",
    ):
        del config[key]
    config |= {
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 3, "head_dim": 12, "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CASES = {
    "kimi_linear": Case(write, tensors=_SPOILT),
    "kimi_linear-groups": Case(
        lambda folder: write(
            folder, n_group=3, topk_group=2, norm_topk_prob=False, q_lora_rank=11, attention_bias=True,
            linear_conv_kernel_dim=3, routed_scaling_factor=1.3, n_shared_experts=1,
        ),
        tensors=(*_SPOILT, "1.self_attn.q_a_layernorm"),
    ),
    "kimi_linear-published": Case(write_published, tensors=_SPOILT),
}  # fmt: skip
