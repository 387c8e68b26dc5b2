"""The tiny checkpoints of every hybrid family: ``cases_<family>.py`` files beside this one, found by their names.

Such a file has ``CASES``, a table of :class:`Case` by name. Nothing else is needed for a family to run through all of
``test_hybrids.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle import load_oracle

#: Log-probs (tokens, vocabulary) of token ids, from one forward over all of them without any cache.
Answer = Callable[[list[int]], Tensor]


def transformers_answer(folder: Path, dtype: torch.dtype) -> Answer:
    """What transformers' own class says, computing in ``dtype``."""
    model = _model(folder, dtype)

    def answer(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)

    return answer


@cache
def _model(folder: Path, dtype: torch.dtype) -> Any:
    return load_oracle(folder, dtype)


@dataclass(frozen=True)
class Case:
    """A checkpoint to write and whom to believe about it.

    Attributes:
        write: makes the folder, with weights that make the state matter (see ``checkpoints.write_hybrid``).
        answer: of the folder, computed in a dtype: transformers' class, or a plain float64 model of our own where
            transformers has none or is wrong.
        tensors: each of these substrings names tensors that the faults' test spoils; the first few otherwise.
        weightless: mixers, by number in the order of their states, whose memory may be forgotten unseen.
    """

    write: Callable[[Path], Path]
    answer: Callable[[Path, torch.dtype], Answer] = transformers_answer
    tensors: tuple[str, ...] = ()
    weightless: tuple[int, ...] = ()


def find_cases() -> dict[str, Case]:
    """Every family's cases by name."""
    found: dict[str, Case] = {}
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        for name, case in import_module(file.stem).CASES.items():
            assert name not in found, name
            found[name] = case
    return found
