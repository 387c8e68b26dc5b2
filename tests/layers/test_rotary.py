"""Turned queries against transformers' own cosines and sines, for every kind of scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recurra.layers.rotary import Rotary
from recurra.models.config import Fields
from recurra.models.rotary import read_rotary

HEADS, DIM, FILE = 3, 32, Path("config.json")
POSITIONS = torch.tensor([0, 1, 2, 30, 31, 32, 33, 1000, 8191, 8192, 131071, 262143])

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "large base": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096,
    },
    "yarn with everything": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 512,
        "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False,
    },
    "yarn with its factor of the values": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
    },
}  # fmt: skip


def _half(cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    """The turn as transformers' models apply it; what is beyond the cosines passes."""
    dim = cos.shape[-1]
    turning, rest = x[..., :dim], x[..., dim:]
    a, b = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
    return torch.cat((turned, rest), dim=-1)


def _theirs(embedding: Any) -> tuple[Tensor, Tensor]:
    cos, sin = embedding(torch.zeros(1), POSITIONS[None])
    return cos[0], sin[0]


def _check(config: Any, embedding: Any, partial: float = 1.0, interleaved: bool = False) -> None:
    torch.manual_seed(0)
    x = torch.randn(len(POSITIONS), HEADS, DIM)
    rotary = read_rotary(Fields(config.to_dict(), FILE), DIM, partial=partial, interleaved=interleaved)
    (got,) = Rotary(rotary, torch.device("cpu"))(POSITIONS, x)
    want = _half(*_theirs(embedding(config)), x)
    # The angle is a product rounded to float32: at 262,143 radians its last bit is 1/64.
    torch.testing.assert_close(got[:8], want[:8], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_scaling_as_transformers_has_it(name: str, partial: float) -> None:
    import transformers as hf
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    how = {**SCALINGS[name], "partial_rotary_factor": partial}
    config = hf.Qwen3NextConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=262144,
        rope_parameters=how,
    )
    _check(config, Qwen3NextRotaryEmbedding)


def test_text_alone_makes_three_axes_one() -> None:
    """Qwen3.5 turns by time, height and width; in text all three are the position."""
    import transformers as hf
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    how = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }  # fmt: skip
    config = hf.Qwen3_5TextConfig(
        hidden_size=64, num_attention_heads=2, head_dim=DIM, rope_parameters=how, num_hidden_layers=4
    )
    _check(config, Qwen3_5TextRotaryEmbedding)


FAMILIES = {
    "bamba": ("Bamba", {}, 0.5),
    "zamba2": ("Zamba2", {"attention_head_dim": DIM, "num_hidden_layers": 54}, 1.0),
    "falcon_h1": ("FalconH1", {"head_dim": DIM}, 1.0),
    "granitemoehybrid": ("GraniteMoeHybrid", {}, 1.0),
    "lfm2": ("Lfm2", {}, 1.0),
    "lfm2_moe": ("Lfm2Moe", {}, 1.0),
    "minimax": ("MiniMax", {"head_dim": DIM}, 1.0),
    "olmo_hybrid": ("OlmoHybrid", {}, 1.0),
    "recurrent_gemma": ("RecurrentGemma", {}, 0.5),
    "bailing_hybrid": ("BailingHybrid", {"head_dim": DIM, "qk_rope_head_dim": DIM}, 1.0),
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_each_family_as_its_configuration_comes(name: str) -> None:
    """With the defaults of its class: base and share of the values that turn."""
    import importlib

    import transformers as hf

    stem, options, partial = FAMILIES[name]
    given = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4, **options}
    config = getattr(hf, f"{stem}Config")(**given)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    _check(config, getattr(module, f"{stem}RotaryEmbedding"), partial)


def test_neighbours_pair_where_asked() -> None:
    import transformers as hf

    config = hf.BambaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=4)
    fields = Fields(config.to_dict(), FILE)
    torch.manual_seed(1)
    x = torch.randn(len(POSITIONS), HEADS, DIM)
    apart = Rotary(read_rotary(fields, DIM), torch.device("cpu"))
    together = Rotary(read_rotary(fields, DIM, interleaved=True), torch.device("cpu"))
    dim = apart.sizes.dim
    order = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))
    (want,) = apart(POSITIONS, torch.cat((x[..., order], x[..., dim:]), dim=-1))
    (got,) = together(POSITIONS, x)
    torch.testing.assert_close(torch.cat((got[..., order], got[..., dim:]), dim=-1), want)


def test_an_unknown_kind_is_refused_by_name() -> None:
    from recurra.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"longrope.*Known: default, linear, llama3, yarn"):
        read_rotary(Fields({"rope_parameters": {"rope_type": "longrope"}}, FILE), DIM)
