"""RecurrentGemma checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Two recurrent layers, one that attends to the last 9 positions, and a recurrent one."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
        "intermediate_size": 80, "attention_window_size": 9, "final_norm": "model.final_norm.weight",
    }  # fmt: skip
    return write_hybrid(folder, RecurrentGemmaConfig, RecurrentGemmaForCausalLM, sizes | overrides)


CASES = {
    "recurrent_gemma": Case(write),
    "recurrent_gemma-biases": Case(
        lambda folder: write(
            folder, attention_bias=True, block_types=["attention", "recurrent"], logits_soft_cap=8.0
        )
    ),
}
