"""Ling (BailingHybrid) checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Two layers of Kimi delta attention, one of latent attention, and one more; experts from the second on."""
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 4, "layer_group_size": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 60, "moe_intermediate_size": 20, "num_local_experts": 8,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "head_dim": 12,
    }  # fmt: skip
    return write_hybrid(folder, BailingHybridConfig, BailingHybridForCausalLM, sizes | overrides)


_TENSORS = ("input_layernorm.weight", "mlp.gate.weight", "shared_experts.up_proj.weight")
CASES = {
    "bailing_hybrid": Case(write, tensors=_TENSORS),
    "bailing_hybrid-free": Case(
        lambda folder: write(folder, kda_safe_gate=False, q_lora_rank=10, norm_topk_prob=False),
        tensors=_TENSORS,
    ),
}
