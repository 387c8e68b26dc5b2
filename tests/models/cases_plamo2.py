"""PLaMo 2 checkpoints. transformers has no class: the answer is a plain model written here from the equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hybrid_cases import Answer, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import VOCABULARY

_CONFIG = {
    "architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2", "hidden_size": 48, "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_head": 16,
    "mamba_d_state": 20, "mamba_d_conv": 4, "mamba_num_heads": 6, "mamba_step": 3, "intermediate_size": 40,
    "vocab_size": VOCABULARY, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def _attends(config: dict[str, Any], i: int) -> bool:
    step = config["mamba_step"]
    return bool(i % step == step // 2)


def write(folder: Path, **overrides: Any) -> Path:
    """Layers 1 of every 3 attend, the others are Mamba; stored under the published names."""
    config = _CONFIG | overrides
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * gain * shape[-1] ** -0.5

    def about(center: float, *shape: int, spread: float = 0.2) -> Tensor:
        return center + spread * (torch.rand(*shape, generator=generator) - 0.5)

    D, P, H, N = (
        config[k] for k in ("hidden_size", "hidden_size_per_head", "mamba_num_heads", "mamba_d_state")
    )
    rank, q, kv = max(64, D // 16), config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, D, generator=generator)}
    tensors["model.norm.weight"] = about(1.5, D)
    for i in range(config["num_hidden_layers"]):
        layer, mixer = f"model.layers.layers.{i}", f"model.layers.layers.{i}.mixer"
        for name, center in (("pre_mixer", 0.0), ("post_mixer", 0.6), ("pre_mlp", 0.0), ("post_mlp", 0.6)):
            tensors[f"{layer}.{name}_norm.weight"] = about(center, D)
        tensors[f"{layer}.mlp.gate_up_proj.weight"] = matrix(2 * config["intermediate_size"], D)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(D, config["intermediate_size"])
        if _attends(config, i):
            tensors[f"{mixer}.qkv_proj.weight"] = matrix((q + 2 * kv) * P, D)
            tensors[f"{mixer}.o_proj.weight"] = matrix(D, q * P)
            tensors[f"{mixer}.q_weight"], tensors[f"{mixer}.k_weight"] = about(1.5, q, P), about(1.5, kv, P)
        else:
            tensors[f"{mixer}.in_proj.weight"] = matrix(2 * H * P, D)
            tensors[f"{mixer}.conv1d.weight"] = about(0.0, H * P, 1, config["mamba_d_conv"], spread=1.8)
            tensors[f"{mixer}.bcdt_proj.weight"] = matrix(2 * N + rank, H * P)
            tensors[f"{mixer}.dt_proj.weight"] = matrix(H, rank)
            for name, width in (("B", N), ("C", N), ("dt", rank)):
                tensors[f"{mixer}.{name}_norm_weight"] = about(1.0, width)
            tensors[f"{mixer}.A_log"], tensors[f"{mixer}.dt_bias"] = (
                about(-4.0, H),
                about(-2.5, H, spread=3.0),
            )
            tensors[f"{mixer}.D"] = about(1.0, H)
            tensors[f"{mixer}.out_proj.weight"] = matrix(D, H * P)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _norm(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight + offset)


def _turn(x: Tensor) -> Tensor:
    """Rotary positions of x (T, heads, dim)."""
    T, _, dim = x.shape
    angle = torch.arange(T, dtype=x.dtype)[:, None] * 10000.0 ** (
        -torch.arange(0, dim, 2, dtype=x.dtype) / dim
    )
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _attend(x: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    P, q_heads, kv_heads = (
        config[k] for k in ("hidden_size_per_head", "num_attention_heads", "num_key_value_heads")
    )
    T = x.shape[0]
    q, k, v = (x @ w["qkv_proj.weight"].T).view(T, -1, P).split([q_heads, kv_heads, kv_heads], dim=1)
    q, k = _turn(_norm(q, w["q_weight"])), _turn(_norm(k, w["k_weight"]))
    k, v = (t.repeat_interleave(q_heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * P**-0.5
    place = torch.arange(T)
    hidden = place[None] > place[:, None]
    if config.get("full_attention_idx") is not None:
        hidden |= place[None] <= place[:, None] - config["attention_window_size"]
    y = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return y.reshape(T, -1) @ w["o_proj.weight"].T


def _mamba(x: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    P, H, N, W = (
        config[k] for k in ("hidden_size_per_head", "mamba_num_heads", "mamba_d_state", "mamba_d_conv")
    )
    T = x.shape[0]
    z, u = (x @ w["in_proj.weight"].T).view(T, H, 2 * P).chunk(2, -1)
    u = u.reshape(T, H * P)
    padded = torch.cat((u.new_zeros(W - 1, H * P), u))
    u = F.silu(sum(padded[j : j + T] * w["conv1d.weight"][:, 0, j] for j in range(W)))
    B, C, dt = (u @ w["bcdt_proj.weight"].T).split([N, N, w["dt_proj.weight"].shape[1]], -1)
    B, C = _norm(B, w["B_norm_weight"]), _norm(C, w["C_norm_weight"])
    dt = F.softplus(_norm(dt, w["dt_norm_weight"]) @ w["dt_proj.weight"].T + w["dt_bias"])
    state, rows = u.new_zeros(H, P, N), []
    for t in range(T):
        decay = torch.exp(-torch.exp(w["A_log"]) * dt[t])[:, None, None]
        state = decay * state + (dt[t, :, None] * u[t].view(H, P))[..., None] * B[t]
        rows.append(state @ C[t] + w["D"][:, None] * u[t].view(H, P))
    return (torch.stack(rows) * F.silu(z)).reshape(T, -1) @ w["out_proj.weight"].T


def answer(folder: Path, dtype: torch.dtype) -> Answer:
    config = json.loads((folder / "config.json").read_text())
    stored = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}

    def log_probs(tokens: list[int]) -> Tensor:
        x = stored["model.embed_tokens.weight"][torch.tensor(tokens)]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.layers.{i}."
            w = {name.removeprefix(layer): t for name, t in stored.items() if name.startswith(layer)}
            mine = {name.removeprefix("mixer."): t for name, t in w.items()}
            part = _attend if _attends(config, i) else _mamba
            y = part(_norm(x, w["pre_mixer_norm.weight"], 1.0), mine, config)
            x = x + _norm(y, w["post_mixer_norm.weight"], 1 / 5)
            gate, up = (_norm(x, w["pre_mlp_norm.weight"], 1.0) @ w["mlp.gate_up_proj.weight"].T).chunk(2, -1)
            x = x + _norm(
                F.silu(gate) * up @ w["mlp.down_proj.weight"].T, w["post_mlp_norm.weight"], 1 / 5**1.5
            )
        logits = _norm(x, stored["model.norm.weight"], 1.0) @ stored["model.embed_tokens.weight"].T
        return logits.double().log_softmax(-1)

    return log_probs


CASES = {
    "plamo2": Case(write, answer),
    "plamo2-window": Case(
        lambda folder: write(folder, full_attention_idx=[], attention_window_size=9), answer
    ),
}
