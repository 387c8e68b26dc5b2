"""Phi-4-flash checkpoints. transformers has no class: the answer is a plain model written here from the papers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hybrid_cases import Answer, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import VOCABULARY

_CONFIG = {
    "architectures": ["Phi4FlashForCausalLM"], "model_type": "phi4flash", "hidden_size": 48, "num_hidden_layers": 8,
    "layer_norm_eps": 1e-5, "num_attention_heads": 8, "num_key_value_heads": 4, "mb_per_layer": 2,
    "mamba_d_state": 11, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "sliding_window": 9,
    "intermediate_size": 40, "hidden_act": "silu", "vocab_size": VOCABULARY, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def write(folder: Path, **overrides: Any) -> Path:
    """Eight layers: Mamba, window, Mamba, window; memory, full attention; gated memory, attention to shared keys."""
    config = _CONFIG | overrides
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * gain * shape[-1] ** -0.5

    def about(center: float, *shape: int, spread: float = 0.4) -> Tensor:
        return center + spread * (torch.rand(*shape, generator=generator) - 0.5)

    D, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    dim, kv = D // config["num_attention_heads"], config["num_key_value_heads"]
    channels, N, rank = config["mamba_expand"] * D, config["mamba_d_state"], -(-D // 16)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, D, generator=generator)}
    norms = [
        f"model.layers.{i}.{n}"
        for i in range(layers)
        for n in ("input_layernorm", "post_attention_layernorm")
    ]
    for name in norms:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = about(1.0, D), about(0.0, D)
    tensors["model.final_layernorm.weight"] = about(0.6, D)
    tensors["model.final_layernorm.bias"] = about(0.0, D)
    for i in range(layers):
        mixer, mlp = f"model.layers.{i}.attn", f"model.layers.{i}.mlp"
        tensors[f"{mlp}.fc1.weight"], tensors[f"{mlp}.fc2.weight"] = matrix(2 * inner, D), matrix(D, inner)
        if i % 2:
            rows = D if i > layers // 2 + 1 else D + 2 * kv * dim
            tensors[f"{mixer}.Wqkv.weight"] = matrix(rows, D, gain=1.7)
            tensors[f"{mixer}.Wqkv.bias"] = about(0.0, rows)
            tensors[f"{mixer}.out_proj.weight"], tensors[f"{mixer}.out_proj.bias"] = (
                matrix(D, D, gain=2.0),
                about(0.0, D),
            )
            tensors[f"{mixer}.inner_cross_attn.subln.weight"] = about(1.0, 2 * dim)
            for name in _LAMBDAS:
                tensors[f"{mixer}.inner_cross_attn.{name}"] = about(0.0, dim, spread=1.0)
        elif i > layers // 2:
            tensors[f"{mixer}.in_proj.weight"], tensors[f"{mixer}.out_proj.weight"] = (
                matrix(channels, D),
                matrix(D, channels),
            )
        else:
            tensors[f"{mixer}.in_proj.weight"] = matrix(2 * channels, D)
            tensors[f"{mixer}.conv1d.weight"] = about(0.0, channels, 1, config["mamba_d_conv"], spread=1.8)
            tensors[f"{mixer}.conv1d.bias"] = about(0.0, channels)
            tensors[f"{mixer}.x_proj.weight"] = matrix(rank + 2 * N, channels, gain=2.0)
            tensors[f"{mixer}.dt_proj.weight"], tensors[f"{mixer}.dt_proj.bias"] = (
                matrix(channels, rank),
                about(-2.5, channels, spread=3.0),
            )
            tensors[f"{mixer}.A_log"], tensors[f"{mixer}.D"] = about(-4.0, channels, N), about(1.0, channels)
            tensors[f"{mixer}.out_proj.weight"] = matrix(D, channels)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q (T, heads, dim), k (T, fewer heads, dim), v (T, fewer heads, any)."""
    T, share = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    place = torch.arange(T)
    hidden = place[None] > place[:, None]
    if window:
        hidden |= place[None] <= place[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _attend(
    x: Tensor, w: dict[str, Tensor], layer: int, config: dict[str, Any], shared: dict[str, Any]
) -> Tensor:
    D, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    T, dim, half = x.shape[0], D // heads, config["num_hidden_layers"] // 2
    qkv = x @ w["Wqkv.weight"].T + w["Wqkv.bias"]
    q = qkv[:, :D].view(T, heads, dim)
    if layer <= half + 1:
        shared["kv"] = qkv[:, D:].view(T, 2, kv, dim).unbind(1)
    k, v = shared["kv"]
    window = config["sliding_window"] if layer < half else 0
    values = torch.cat((v[:, 0::2], v[:, 1::2]), -1)
    first = _softmax_attention(q[:, 0::2], k[:, 0::2], values, window)
    second = _softmax_attention(q[:, 1::2], k[:, 1::2], values, window)
    q1, k1, q2, k2 = (w[f"inner_cross_attn.{name}"] for name in _LAMBDAS)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    y = first - (torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + start) * second
    y = (
        y
        * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        * w["inner_cross_attn.subln.weight"]
        * (1 - start)
    )
    return y.reshape(T, D) @ w["out_proj.weight"].T + w["out_proj.bias"]


def _mamba(
    x: Tensor, w: dict[str, Tensor], layer: int, config: dict[str, Any], shared: dict[str, Any]
) -> Tensor:
    half, N, W = config["num_hidden_layers"] // 2, config["mamba_d_state"], config["mamba_d_conv"]
    if layer > half:
        return (shared["memory"] * F.silu(x @ w["in_proj.weight"].T)) @ w["out_proj.weight"].T
    T = x.shape[0]
    u, z = (x @ w["in_proj.weight"].T).chunk(2, -1)
    padded = torch.cat((u.new_zeros(W - 1, u.shape[1]), u))
    u = F.silu(sum(padded[j : j + T] * w["conv1d.weight"][:, 0, j] for j in range(W)) + w["conv1d.bias"])
    rank = w["dt_proj.weight"].shape[1]
    dt, B, C = (u @ w["x_proj.weight"].T).split([rank, N, N], -1)
    dt = F.softplus(dt @ w["dt_proj.weight"].T + w["dt_proj.bias"])
    state, rows = u.new_zeros(u.shape[1], N), []
    for t in range(T):
        state = torch.exp(dt[t, :, None] * -torch.exp(w["A_log"])) * state + (dt[t] * u[t])[:, None] * B[t]
        rows.append(state @ C[t] + w["D"] * u[t])
    y = torch.stack(rows)
    if layer == half:
        shared["memory"] = y
    return (y * F.silu(z)) @ w["out_proj.weight"].T


def answer(folder: Path, dtype: torch.dtype) -> Answer:
    config = json.loads((folder / "config.json").read_text())
    stored = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], stored[f"{name}.weight"], stored[f"{name}.bias"], 1e-5)

    def log_probs(tokens: list[int]) -> Tensor:
        x, shared = stored["model.embed_tokens.weight"][torch.tensor(tokens)], dict[str, Any]()
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            start = f"{layer}.attn."
            w = {name.removeprefix(start): t for name, t in stored.items() if name.startswith(start)}
            x = x + (_attend if i % 2 else _mamba)(norm(x, f"{layer}.input_layernorm"), w, i, config, shared)
            h = norm(x, f"{layer}.post_attention_layernorm") @ stored[f"{layer}.mlp.fc1.weight"].T
            gate, up = h.chunk(2, -1)
            x = x + (F.silu(gate) * up) @ stored[f"{layer}.mlp.fc2.weight"].T
        logits = norm(x, "model.final_layernorm") @ stored["model.embed_tokens.weight"].T
        return logits.double().log_softmax(-1)

    return log_probs


CASES = {"phi4_flash": Case(write, answer)}
