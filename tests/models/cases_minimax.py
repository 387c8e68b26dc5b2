"""MiniMax checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three layers of lightning attention around one of softmax attention."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "num_local_experts": 5, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "full_attn_alpha_factor": 1.3, "linear_attn_alpha_factor": 1.2, "mlp_alpha_factor": 1.1,
        "full_attn_beta_factor": 0.9, "linear_attn_beta_factor": 0.8, "mlp_beta_factor": 0.7,
    }  # fmt: skip
    return write_hybrid(folder, MiniMaxConfig, MiniMaxForCausalLM, sizes | overrides)


CASES = {
    "minimax": Case(write, tensors=("qkv_proj.weight", "experts.0.w1.weight", "input_layernorm.weight")),
    "minimax-window": Case(
        lambda folder: write(folder, sliding_window=9, head_dim=20, tie_word_embeddings=True),
        tensors=("o_proj.weight",),
    ),
}
