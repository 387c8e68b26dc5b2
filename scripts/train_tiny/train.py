"""Train the tiny model for a given number of minutes; the learning rate follows the clock, so it always ends decayed.

Reads the folder that prepare.py wrote, writes log.jsonl, best.json and best-N.safetensors (float32 pieces under 15 MiB).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import Mamba2, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor

PIECE_BYTES = 15 * 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.5, help="training time after compilation")
    parser.add_argument(
        "--deadline", type=float, default=9.2, help="minutes after the start at which to end regardless"
    )
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=Shape.dropout)
    parser.add_argument("--hidden", type=int, default=Shape.hidden_size)
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--eval-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", type=Path, help="a folder with .safetensors files to start from")
    parser.add_argument(
        "--keep-last", action="store_true", help="ship the last weights, not those of the least held-out loss"
    )
    return parser.parse_args()


class Windows:
    """Random windows of the training tokens, by weighted domain; half of them begin at a document's start."""

    def __init__(self, folder: Path, length: int, device: torch.device, seed: int) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = np.load(folder / "tokens.npz")
        self.length = length
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.domains = list(meta["weights"])
        self.weights = torch.tensor([meta["weights"][d] for d in self.domains], device=device)
        self.tokens = [self._put(arrays[f"{d}.train"]) for d in self.domains]
        self.held_out = {d: self._put(arrays[f"{d}.heldout"]) for d in self.domains}
        self.held_out_bytes = {d: meta["heldout_bytes"][d] for d in self.domains}
        self.starts = [torch.nonzero(t == meta["end_of_text"]).squeeze(1) for t in self.tokens]
        self.offsets = torch.arange(length + 1, device=device)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self.device)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        share = (self.weights / self.weights.sum() * size).tolist()
        counts = [int(s) for s in share]
        # the fractional parts are handed out in turn, largest first, so that every batch has the same mix
        for index in sorted(range(len(share)), key=lambda i: counts[i] - share[i])[: size - sum(counts)]:
            counts[index] += 1
        rows = [self._rows(i, n) for i, n in enumerate(counts) if n]
        window = torch.cat(rows).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _rows(self, domain: int, count: int) -> Tensor:
        tokens, starts = self.tokens[domain], self.starts[domain]
        last = tokens.numel() - self.length - 1
        where = torch.randint(0, last, (count,), device=self.device, generator=self.generator)
        snapped = starts[torch.searchsorted(starts, where).clamp(max=starts.numel() - 1)].clamp(max=last)
        coin = torch.rand(count, device=self.device, generator=self.generator) < 0.5
        return tokens[torch.where(coin, snapped, where)[:, None] + self.offsets]

    def held_out_batches(self, domain: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every held-out token once, in windows of the training length; the last is padded with target -100."""
        tokens = self.held_out[domain].long()
        count = math.ceil((tokens.numel() - 1) / self.length)
        padded = F.pad(tokens, (0, count * self.length + 1 - tokens.numel()), value=-100)
        inputs = padded[:-1].clamp(min=0).view(count, self.length)
        targets = padded[1:].view(count, self.length)
        for i in range(0, count, size):
            rows, aims = inputs[i : i + size], targets[i : i + size]
            missing = size - rows.shape[0]  # one batch shape, so that nothing is compiled twice
            yield F.pad(rows, (0, 0, 0, missing)), F.pad(aims, (0, 0, 0, missing), value=-100)


def loss_sum(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head).float()  # the product is bf16 under autocast
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def parameter_groups(model: Mamba2, weight_decay: float) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class Held:
    """Held-out loss, and the best weights seen."""

    def __init__(
        self, windows: Windows, size: int, loss: Callable[[Tensor, Tensor], Tensor], keep_last: bool
    ) -> None:
        self.keep_last = keep_last
        self.windows, self.size, self.loss = windows, size, loss
        self.best = math.inf
        self.best_state: dict[str, Tensor] = {}
        self.best_result: dict[str, object] = {}

    @torch.compiler.set_stance("force_eager")  # compiling a second graph costs more time than it saves
    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean loss per token in nats, a domain each and over all weighted by the training mix."""
        losses: dict[str, float] = {}
        for domain in self.windows.domains:
            total = sum(self.loss(i, t) for i, t in self.windows.held_out_batches(domain, self.size))
            losses[domain] = float(total) / (self.windows.held_out[domain].numel() - 1)
        weights = dict(zip(self.windows.domains, self.windows.weights.tolist(), strict=True))
        losses["all"] = sum(losses[d] * w for d, w in weights.items()) / sum(weights.values())
        return losses

    def keep_if_better(
        self, losses: dict[str, float], state: dict[str, Tensor], about: dict[str, object]
    ) -> None:
        if losses["all"] < self.best or self.keep_last:
            self.best = losses["all"]
            self.best_state = {name: value.detach().float().cpu().clone() for name, value in state.items()}
            self.best_result = {**about, "heldout": losses}


def save_pieces(state: dict[str, Tensor], folder: Path) -> None:
    pieces: list[dict[str, Tensor]] = [{}]
    for name, value in state.items():
        if sum(v.nbytes for v in pieces[-1].values()) + value.nbytes > PIECE_BYTES:
            pieces.append({})
        pieces[-1][name] = value.contiguous()
    for index, piece in enumerate(pieces):
        save_file(piece, folder / f"best-{index}.safetensors")


def main() -> None:
    args = arguments()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shape = replace(Shape(), hidden_size=args.hidden, num_layers=args.layers, dropout=args.dropout)
    model = Mamba2(shape).to(device)
    if args.resume:
        pieces = [load_file(p) for p in sorted(args.resume.glob("*.safetensors"))]
        model.load_state_dict({name: value for piece in pieces for name, value in piece.items()})
    windows = Windows(args.data, args.length, device, args.seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    weights = dict(model.named_parameters())
    average = {name: p.detach().clone() for name, p in weights.items()}
    if not args.no_compile:
        for block in model.backbone.layers:
            block.compile()
    head_loss = loss_sum if args.no_compile else torch.compile(loss_sum)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return head_loss(model(ids), model.backbone.embeddings.weight, targets)

    log = (args.out / "log.jsonl").open("w")

    def record(**fields: object) -> None:
        line = json.dumps({"wall": round(time.monotonic() - began, 2), **fields})
        log.write(line + "\n")
        log.flush()
        print(line, flush=True)

    parameters = sum(p.numel() for p in model.parameters())
    record(
        parameters=parameters,
        device=str(device),
        torch=torch.__version__,
        **{k: str(v) for k, v in vars(args).items()},
    )
    held = Held(windows, args.batch, loss, args.keep_last)
    per_step = args.batch * args.length

    def train_step(lr: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        value = loss(*windows.batch(args.batch)) / per_step
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def evaluate(step: int) -> None:
        model.eval()
        about = {"step": step, "tokens": step * per_step}
        for kind in ("raw", "ema"):
            if kind == "ema":
                swap(weights, average)
            losses = held.measure()
            if kind == "raw" or not args.keep_last:
                held.keep_if_better(losses, weights, {**about, "kind": kind})
            if kind == "ema":
                swap(weights, average)
            record(**about, kind=kind, heldout={k: round(v, 4) for k, v in losses.items()})
        model.train()

    def save() -> None:
        save_pieces(held.best_state, args.out)
        elapsed = time.monotonic() - began
        result = {**held.best_result, "parameters": parameters, "shape": shape.as_dict(), "train_tokens": step * per_step,
                  "steps": step, "wall_seconds": round(elapsed, 1), "train_seconds": round(time.monotonic() - start, 1),
                  "arguments": {k: str(v) for k, v in vars(args).items()}}  # fmt: skip
        (args.out / "best.json").write_text(json.dumps(result, indent=1))

    model.train()
    for _ in range(3):  # compile and warm up at a zero learning rate: the weights do not move
        train_step(0.0)
    start, step = time.monotonic(), 0
    record(compiled_seconds=round(time.monotonic() - began, 1))
    start = time.monotonic()
    budget = min(args.minutes * 60, args.deadline * 60 - (start - began))
    probe, probe_step, next_eval, saved = start, 0, args.eval_every, start
    while True:
        elapsed = time.monotonic() - start
        if elapsed >= budget:
            break
        fraction = elapsed / budget
        lr = (
            args.lr
            * min(1.0, (step + 1) / args.warmup_steps)
            * (0.02 + 0.98 * (1 + math.cos(math.pi * fraction)) / 2)
        )
        value = train_step(lr)
        step += 1
        decay = min(args.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in weights.values()], 1 - decay)
        if step % 25 == 0:
            mean = float(value)  # waits for the device, so that the clock below is honest
            now = time.monotonic()
            rate = (step - probe_step) * per_step / (now - probe)
            record(
                step=step,
                tokens=step * per_step,
                loss=round(mean, 4),
                lr=round(lr, 6),
                tokens_per_second=round(rate),
            )
            if elapsed >= next_eval:
                evaluate(step)
                next_eval = elapsed + args.eval_every
            if time.monotonic() - saved > 120:
                save()
                saved = time.monotonic()
            probe, probe_step = time.monotonic(), step
    evaluate(step)
    save()
    record(
        done=True,
        best=held.best_result,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0,
    )


@torch.no_grad()
def swap(weights: dict[str, Tensor], average: dict[str, Tensor]) -> None:
    """Exchange the values of the two, in place."""
    for name, parameter in weights.items():
        kept = parameter.detach().clone()
        parameter.copy_(average[name])
        average[name].copy_(kept)


if __name__ == "__main__":
    main()
