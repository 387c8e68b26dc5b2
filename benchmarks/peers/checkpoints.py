"""Write a random checkpoint of a published shape with ``transformers``: python checkpoints.py NAME FOLDER"""

from __future__ import annotations

import sys

import torch
import transformers

SHAPES = {
    "mamba-130m": (
        "Mamba",
        {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "expand": 2,
         "time_step_rank": 48, "conv_kernel": 4, "tie_word_embeddings": True},
    ),
    "mamba2-130m": (
        "Mamba2",
        {"vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 128, "expand": 2,
         "num_heads": 24, "head_dim": 64, "n_groups": 1, "conv_kernel": 4, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def main(name: str, folder: str) -> None:
    torch.manual_seed(0)
    kind, fields = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    getattr(transformers, f"{kind}ForCausalLM")(config).float().eval().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
