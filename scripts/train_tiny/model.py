"""A Mamba-2 language model in plain PyTorch, for training.

Written from the equations of the state-space-duality paper (Dao and Gu, 2024, section 6). The parameter names
are those of transformers' ``Mamba2ForCausalLM``, so that a state dict is a checkpoint. Shapes: b batch,
t tokens, c chunks, q tokens in a chunk, h heads, p head dim, n state size.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The size of the model; one group of B and C, ``expand = 2``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 18
    head_dim: int = 64
    state_size: int = 64
    conv_kernel: int = 4
    chunk_size: int = 64
    eps: float = 1e-5
    dropout: float = 0.1

    @property
    def inner(self) -> int:
        return 2 * self.hidden_size

    @property
    def heads(self) -> int:
        return self.inner // self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.state_size

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight``, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise causal convolution as W shifted products: ``x`` (b, t, d), ``weight`` (d, 1, W)."""
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    taps = [padded[:, k : k + x.shape[1]] * weight[:, 0, k].to(x.dtype) for k in range(width)]
    return sum(taps[1:], taps[0]) + bias.to(x.dtype)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int, low: torch.dtype) -> Tensor:
    """Run ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``, ``y_t = S_t C_t`` for whole sequences at once.

    ``x`` (b, t, h, p), ``dt`` (b, t, h) float32, ``A`` (h,) float32, ``B`` and ``C`` (b, t, n); t is a multiple
    of ``chunk``. Inside a chunk the recurrence is a masked matrix product in dtype ``low``; decays, chunk
    states and the passage between chunks are float32. Returns (b, t, h, p) float32.
    """
    b, t, h, p = x.shape
    n, c = B.shape[-1], t // chunk
    log_decay = (dt * A).view(b, c, chunk, h).permute(0, 1, 3, 2).cumsum(-1)  # (b, c, h, q)
    xdt = (x * dt[..., None]).view(b, c, chunk, h, p).transpose(2, 3)  # (b, c, h, q, p)
    B = B.view(b, c, chunk, n)
    C = C.view(b, c, chunk, n)

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    span = log_decay[..., :, None] - log_decay[..., None, :]
    decay = span.masked_fill(~causal, -math.inf).exp()  # (b, c, h, q, q)
    scores = (C.to(low) @ B.to(low).transpose(-1, -2))[:, :, None]  # (b, c, 1, q, q)
    within = (scores * decay).to(low) @ xdt.to(low)

    to_end = (log_decay[..., -1:] - log_decay).exp()
    added = (xdt.float() * to_end[..., None]).transpose(-1, -2) @ B.float()[:, :, None]  # (b, c, h, p, n)
    total = F.pad(log_decay[..., -1], (0, 0, 1, 0)).transpose(1, 2).cumsum(-1)  # (b, h, c + 1)
    earlier = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)
    carry = (total[..., :c, None] - total[..., None, 1:]).masked_fill(~earlier, -math.inf).exp()
    start = carry @ added.transpose(1, 2).reshape(b, h, c, p * n)  # state at each chunk's start
    start = start.view(b, h, c, p, n).transpose(1, 2)
    across = (C.float()[:, :, None] @ start.transpose(-1, -2)) * log_decay.exp()[..., None]
    return (within.float() + across).transpose(2, 3).reshape(b, t, h, p)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Mixer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj = nn.Linear(shape.hidden_size, shape.inner + shape.conv_dim + shape.heads, bias=False)
        self.conv1d = nn.Conv1d(shape.conv_dim, shape.conv_dim, shape.conv_kernel, groups=shape.conv_dim)
        self.dt_bias = nn.Parameter(initial_dt_bias(shape.heads))
        self.A_log = nn.Parameter(torch.empty(shape.heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(shape.heads))
        self.norm = Norm(shape.inner, shape.eps)
        self.out_proj = nn.Linear(shape.inner, shape.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        shape = self.shape
        gate, xbc, dt = self.in_proj(u).split([shape.inner, shape.conv_dim, shape.heads], dim=-1)
        xbc = F.silu(causal_conv(xbc, self.conv1d.weight, self.conv1d.bias))
        x, B, C = xbc.split([shape.inner, shape.state_size, shape.state_size], dim=-1)
        x = x.unflatten(-1, (shape.heads, shape.head_dim))
        dt = F.softplus(dt.float() + self.dt_bias)
        low = gate.dtype
        with torch.autocast(u.device.type, enabled=False):
            y = ssd(x, dt, -self.A_log.exp(), B, C, shape.chunk_size, low)
            y = (y + x.float() * self.D[:, None]).flatten(-2) * F.silu(gate.float())
        return self.out_proj(self.norm(y).to(low))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden_size, shape.eps)
        self.mixer = Mixer(shape)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mixer(self.norm(x)).float(), self.dropout, self.training)


class Backbone(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm_f = Norm(shape.hidden_size, shape.eps)


class Mamba2(nn.Module):
    """Token ids (b, t) to final hidden states (b, t, hidden); the head is the embedding matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.backbone = Backbone(shape)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.02)
        for block in self.backbone.layers:
            nn.init.normal_(block.mixer.in_proj.weight, std=0.02)
            nn.init.normal_(block.mixer.out_proj.weight, std=0.02 / math.sqrt(shape.num_layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.backbone.embeddings(ids).float()
        for block in self.backbone.layers:
            x = block(x)
        return self.backbone.norm_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.backbone.embeddings.weight)


def initial_dt_bias(heads: int) -> Tensor:
    """Inverse softplus of step sizes drawn log-uniformly from 0.001 to 0.1."""
    dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return dt + torch.log(-torch.expm1(-dt))
