"""Draw training and held-out loss over tokens from the logs of train.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+", help="log.jsonl of each stage, in order")
    parser.add_argument("--starts", type=float, nargs="+", help="tokens (millions) at which each stage began")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, (log, start) in enumerate(zip(args.logs, args.starts, strict=True)):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        train = [(start + r["tokens"] / 1e6, r["loss"]) for r in rows if "loss" in r]
        held = [
            (start + r["tokens"] / 1e6, r["heldout"]["all"])
            for r in rows
            if r.get("kind") == "ema" and r["tokens"]
        ]
        name = f"stage {index + 1}"
        axes.plot(*zip(*train, strict=True), lw=0.7, label=f"{name}: training loss of single batches")
        axes.plot(*zip(*held, strict=True), "o-", ms=3, label=f"{name}: held-out loss of averaged weights")
    axes.set(
        xlabel="tokens (millions)", ylabel="loss (nats per token)", ylim=(0.5, 4.5), title="recurra-tiny"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
