"""What the workers share: the prompts, and a loop that answers lines of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

PROMPT = 16  # tokens before a timed decode


def make_prompt(seed: int, length: int, vocab: int) -> list[int]:
    """The prompt that every implementation gets for this seed and length."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, length).tolist()
    return tokens


def serve(model: Any, version: str) -> None:
    """Answer ``{"op": method, ...}`` lines on standard input until it ends."""
    print(json.dumps({"ready": True, "version": version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(model, request.pop("op"))(**request)
        print(json.dumps(answer), flush=True)
