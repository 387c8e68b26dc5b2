"""Checkpoints with transformers' answers to them, and machines to run models on; no fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from model_driver import Driver
from torch import Tensor

import checkpoints
from oracle import load_oracle
from recurra.device import detect
from recurra.models import load_model, read_config
from recurra.ops import Ops, build

#: Log-probs may differ by this much from transformers' in float32. The checkpoints' greedy margins and the
#: effect of their states are far above it (``test_the_checkpoints_can_tell``).
TOLERANCE = 1e-3

#: 1, W - 1, W, some odd ones, and one beyond a kernel chunk of 128.
LENGTHS = (1, 3, 4, 13, 37, 139)


@dataclass(frozen=True)
class Golden:
    """A checkpoint and what transformers' full forward, without any cache, says about prompts.

    Attributes:
        folder: as Recurra reads it.
        hf_folder: the same weights in transformers' layout.
        prompts: length to token ids.
        log_probs: length to (tokens, vocabulary) float32.
    """

    folder: Path
    hf_folder: Path
    prompts: dict[int, list[int]]
    log_probs: dict[int, Tensor]

    def oracle(self) -> Any:
        """transformers' model, float32 on the CPU."""
        return _oracle(self.hf_folder)


@cache
def _oracle(folder: Path) -> Any:
    return load_oracle(folder)


def oracle_log_probs(oracle: Any, tokens: list[int]) -> Tensor:
    """(tokens, vocabulary): one forward over everything, no cache, no padding."""
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens], device=oracle.device), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).float().cpu()


def _codestral(folder: Path) -> Path:
    return checkpoints.write_mamba2(
        folder, hidden_size=256, num_heads=8, head_dim=64, state_size=128, n_groups=8, num_hidden_layers=2
    )


Write = Callable[[Path], Path]
#: name: (write in transformers' layout, rewrite into another or None)
CASES: dict[str, tuple[Write, Callable[[Path, Path], Path] | None]] = {
    "mamba": (checkpoints.write_mamba, None),
    "mamba-biases": (
        lambda f: checkpoints.write_mamba(f, use_bias=True, use_conv_bias=False, tie_word_embeddings=False),
        None,
    ),
    "mamba-original": (checkpoints.write_mamba, checkpoints.write_mamba_ssm),
    "falcon": (checkpoints.write_falcon_mamba, None),
    "mamba2": (lambda f: checkpoints.write_mamba2(f, shards=3), None),
    "mamba2-groups": (lambda f: checkpoints.write_mamba2(f, n_groups=2, conv_kernel=3), None),
    "mamba2-biases": (
        lambda f: checkpoints.write_mamba2(
            f, n_groups=4, use_bias=True, use_conv_bias=False, tie_word_embeddings=True
        ),
        None,
    ),
    "mamba2-limits": (lambda f: checkpoints.write_mamba2(f, time_step_limit=(0.05, 0.1)), None),
    "mamba2-original": (checkpoints.write_mamba2, checkpoints.write_mamba_ssm),
    "codestral": (_codestral, checkpoints.write_codestral),
}


def make_golden(name: str, root: Path) -> Golden:
    """Write the case's checkpoint below ``root`` and ask transformers."""
    write, rewrite = CASES[name]
    hf_folder = write(root / "transformers")
    return golden_of(
        hf_folder if rewrite is None else rewrite(hf_folder, root / "rewritten"), hf_folder, LENGTHS
    )


def golden_of(folder: Path, hf_folder: Path, lengths: Iterable[int]) -> Golden:
    """A checkpoint with transformers' answers to random prompts of these lengths."""
    generator = torch.Generator().manual_seed(7)
    prompts, log_probs = {}, {}
    for length in lengths:
        prompts[length] = torch.randint(checkpoints.VOCABULARY, (length,), generator=generator).tolist()
        log_probs[length] = oracle_log_probs(_oracle(hf_folder), prompts[length])
    return Golden(folder, hf_folder, prompts, log_probs)


@dataclass(frozen=True)
class Machine:
    """A device with the operators of one backend."""

    device: torch.device
    ops: Ops
    num_threads: int

    def driver(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        num_slots: int = 8,
        load_format: str = "auto",
    ) -> Driver:
        """A model ready to run, its weights in ``dtype``; on the CPU it computes in float32 or wider."""
        act = torch.float32 if self.device.type == "cpu" and dtype.itemsize < 4 else dtype
        model = load_model(
            read_config(folder), ops=self.ops, device=self.device, weight_dtype=dtype, act_dtype=act,
            ssm_dtype=torch.float64 if dtype == torch.float64 else torch.float32, load_format=load_format,
        )  # fmt: skip
        return Driver(model, num_slots, self.device)


@cache
def machine_of(device: str, backend: str) -> Machine:
    """The machine called "device/backend"."""
    found = detect(device)
    return Machine(found.torch_device, build(found, backend), found.num_threads)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Every log-prob within the tolerance; NaN never passes."""
    difference = (got.cpu() - want).abs().max().item()
    assert difference <= TOLERANCE, difference
