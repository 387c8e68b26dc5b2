"""What the precision of states costs the shipped model: perplexity and greedy agreement, token by token on the CPU.

The text is the documentation of Python's own modules: like what the model was trained on, and none of it. Every
token takes a decode step, so that the state is rounded as often as there are tokens.

    python benchmarks/state_precision.py --model models/recurra-tiny
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.device import detect
from recurra.engine.tokenizer import Tokenizer
from recurra.models import load_model, read_config
from recurra.ops import build
from recurra.ops.decode_stack import BlockState
from recurra.ops.rounding.reference import load
from recurra.rounding import NEAREST, SCALED, Rounding, stochastic

MODULES = ("argparse", "asyncio.tasks", "concurrent.futures", "csv", "dataclasses", "decimal", "difflib", "email.message",
           "fractions", "heapq", "inspect", "logging", "pathlib", "random", "shutil", "socket", "statistics", "string",
           "subprocess", "tarfile", "textwrap", "threading", "typing", "unittest.case", "urllib.parse", "zipfile")  # fmt: skip
FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
CONTINUED = 128  # tokens of a greedy continuation


def text() -> Iterator[str]:
    """Docstrings of modules, classes and functions."""
    for name in MODULES:
        module = importlib.import_module(name)
        yield inspect.getdoc(module) or ""
        for _, member in inspect.getmembers(module, lambda m: inspect.isclass(m) or inspect.isfunction(m)):
            if member.__module__ == name:
                yield inspect.getdoc(member) or ""


class Run:
    """The model with states of one format, in slots 1 to ``rows``."""

    def __init__(self, model: Any, ops: Any, rows: int, dtype: torch.dtype, rounding: Rounding) -> None:
        specs = tuple(_with_states(spec, dtype) for spec in model.state_specs)
        self.model, self.rounding = model, rounding
        self.pool = StatePool(specs, rows, torch.device("cpu"), rounding)
        blocks = tuple(BlockState(*layer) for layer in self.pool.layers)
        self.step = ops.build_decode_stack(model.stack_weights(), blocks, torch.get_num_threads())
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Log-probabilities (rows, vocabulary) after one more token of each row."""
        self.rounding.advance()
        return self.model.logits(self.step(tokens, self.slots)).log_softmax(-1)

    def states(self) -> Tensor:
        parts = [
            load(layer.ssm, layer.scale if layer.ssm.dtype in SCALED else None, self.slots, torch.float32)
            for layer in self.pool.layers
        ]
        return torch.cat([part.flatten() for part in parts])


def _with_states(spec: Any, dtype: torch.dtype) -> Any:
    from recurra.cache.spec import StateSpec, TensorSpec, scale_spec

    conv, ssm = spec.tensors[:2]
    return StateSpec(spec.kind, (conv, TensorSpec("ssm", ssm.shape, dtype), scale_spec(ssm.shape, dtype)))


@torch.inference_mode()
def read(run: Run, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each next token of (S, length) rows, and the likeliest one."""
    scores, best = [], []
    for at in range(rows.shape[1] - 1):
        logs = run(rows[:, at])
        scores.append(logs.gather(1, rows[:, at + 1 : at + 2])[:, 0])
        best.append(logs.argmax(-1))
    return torch.stack(scores, 1), torch.stack(best, 1)


@torch.inference_mode()
def continued(run: Run, prompts: Tensor) -> Tensor:
    """Greedy continuations (S, CONTINUED)."""
    for at in range(prompts.shape[1]):
        token = run(prompts[:, at]).argmax(-1)
    out = [token]
    for _ in range(CONTINUED - 1):
        out.append(run(out[-1]).argmax(-1))
    return torch.stack(out, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    device = detect("cpu", torch.get_num_threads())
    ops, config = build(device), read_config(options.model)
    model = load_model(config, ops=ops, device=device.torch_device, weight_dtype=config.torch_dtype, act_dtype=torch.float32)  # fmt: skip
    tokenizer = Tokenizer.from_folder(options.model)
    assert tokenizer is not None
    ids = [i for part in text() for i in tokenizer.encode(part + "\n\n", add_special_tokens=False)]
    count = min(8, len(ids) // (options.length - 1))
    body = torch.tensor(ids[: count * (options.length - 1)]).view(count, -1)
    rows = torch.cat([torch.zeros(count, 1, dtype=torch.int64), body], 1)
    prompts = rows[:, :40].contiguous()
    print(f"{len(ids)} tokens of text; {count} x {options.length} read, {count} x {CONTINUED} continued")
    exact: dict[str, Any] = {}
    for dtype in FORMATS:
        for seed in (None, 1, 2) if dtype != torch.float32 else (None,):

            def fresh(dtype: torch.dtype = dtype, seed: int | None = seed) -> Run:
                return Run(model, ops, count, dtype, NEAREST if seed is None else stochastic(seed))

            run = fresh()
            scores, best = read(run, rows)
            state, greedy = run.states(), continued(fresh(), prompts)
            if not exact:
                exact = {"scores": scores, "best": best, "state": state, "greedy": greedy}
            off = (scores - exact["scores"]).double()
            same = greedy == exact["greedy"]
            until = torch.where(same.all(1), CONTINUED, same.int().argmin(1)).double().mean()
            print(
                f"{str(dtype)[6:]:14s} {'nearest' if seed is None else f'stochastic seed {seed}':18s}"
                f" ppl {torch.exp(-scores.double().mean()):8.4f}  nats {off.mean():+.6f} +- {off.std() / off.numel() ** 0.5:.6f}"
                f"  |d| {off.abs().mean():.6f}  same best {(best == exact['best']).double().mean() * 100:6.2f}%"
                f"  greedy same {same.double().mean() * 100:6.2f}% until {until:5.1f}"
                f"  state error {(state - exact['state']).norm() / exact['state'].norm():.2e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
