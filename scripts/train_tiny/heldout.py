"""Held-out loss of an exported model by domain: nats per token, perplexity, bits per byte."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Mamba2, Shape
from safetensors.torch import load_file
from torch import Tensor


def load(folder: Path) -> Mamba2:
    config = json.loads((folder / "config.json").read_text())
    model = Mamba2(Shape(hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"])).eval()
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model


@torch.no_grad()
def loss_sum(model: Mamba2, tokens: Tensor, length: int) -> float:
    """Summed loss of every token but the first, in windows of ``length`` that each start from nothing."""
    count = math.ceil((tokens.numel() - 1) / length)
    padded = F.pad(tokens, (0, count * length + 1 - tokens.numel()), value=-100)
    inputs, targets = padded[:-1].clamp(min=0).view(count, length), padded[1:].view(count, length)
    total = 0.0
    for i in range(0, count, 8):
        logits = model.logits(model(inputs[i : i + 8])).flatten(0, 1)
        total += float(
            F.cross_entropy(logits, targets[i : i + 8].flatten(), ignore_index=-100, reduction="sum")
        )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of prepare.py")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--limit", type=int, default=10**9, help="tokens a domain at most")
    args = parser.parse_args()
    meta = json.loads((args.data / "meta.json").read_text())
    arrays = np.load(args.data / "tokens.npz")
    model = load(args.model)
    weighted = 0.0
    for domain, weight in meta["weights"].items():
        whole = arrays[f"{domain}.heldout"]
        tokens = torch.from_numpy(whole[: args.limit].astype(np.int64))
        total = loss_sum(model, tokens, args.length)
        loss = total / (tokens.numel() - 1)
        bits = loss / math.log(2) * (whole.size - 1) / meta["heldout_bytes"][domain]
        weighted += weight * loss
        print(f"| {domain} | {tokens.numel()} | {loss:.4f} | {math.exp(loss):.2f} | {bits:.3f} |", flush=True)
    print(f"| all, weighted as in training | | {weighted:.4f} | {math.exp(weighted):.2f} | |")


if __name__ == "__main__":
    main()
