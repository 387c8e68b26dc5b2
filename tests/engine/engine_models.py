"""Real tiny models for the engine's tests: what transformers' full forward says, and engines on them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fakes import poison_slots
from torch import Tensor

import checkpoints
from oracle import load_oracle
from recurra.config.engine import EngineConfig
from recurra.engine.engine import LLMEngine

FAMILIES = {
    "mamba": checkpoints.write_mamba,
    "falcon_mamba": checkpoints.write_falcon_mamba,
    "mamba2": checkpoints.write_mamba2,
}

#: Prompt lengths: 1, W - 1, W, Q - 1, Q, Q + 1 (Mamba-2's kernel chunk is 16 here) and odd ones.
LENGTHS = (1, 3, 4, 15, 16, 17, 41)
TOLERANCE = 1e-3


@dataclass
class RealModel:
    """A checkpoint, and transformers' own forward over it, float32, no cache."""

    folder: Path
    prompts: dict[str, list[int]]
    _greedy: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    @cached_property
    def oracle(self) -> Any:
        return load_oracle(self.folder)

    def log_probs(self, tokens: list[int]) -> Tensor:
        """(tokens, vocabulary)."""
        with torch.no_grad():
            logits = self.oracle(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def greedy(self, name: str, count: int) -> list[int]:
        """Generate by a full forward a token."""
        if (name, count) not in self._greedy:
            tokens = list(self.prompts[name])
            for _ in range(count):
                tokens.append(int(self.log_probs(tokens)[-1].argmax()))
            self._greedy[name, count] = tokens[-count:]
        return self._greedy[name, count]

    def engine(self, poison: bool = True, **settings: Any) -> LLMEngine:
        """An engine whose free slots hold NaN."""
        chosen = {
            "device": "cpu",
            "num_threads": 1,
            "max_num_seqs": 8,
            "mamba_config": {"backend": "cpu"},
        } | settings
        engine = LLMEngine(EngineConfig(model=str(self.folder), **chosen))
        if poison:
            poison_slots(engine)
        return engine


def write(family: str, folder: Path) -> RealModel:
    """Write a checkpoint with a tokenizer."""
    rng = random.Random(family)
    prompts = {str(n): [rng.randrange(1, checkpoints.VOCABULARY) for _ in range(n)] for n in LENGTHS}
    return RealModel(FAMILIES[family](folder, tokenizer=True), prompts)
