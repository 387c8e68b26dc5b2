"""Hybrid families: how a tiny checkpoint of each is written. A new family adds a line here.

Each entry writes a checkpoint with transformers' own class whose weights make the state matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoints

Write = Callable[[Path], Path]

#: name: writes the folder. Names are the families' in :data:`recurra.models.ARCHITECTURES`, perhaps with a variant.
HYBRIDS: dict[str, Write] = {
    "bamba": checkpoints.write_bamba,
    "bamba-biases": lambda f: checkpoints.write_bamba(
        f,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
}
