"""What was measured of each request, and its summary."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from recurra import __version__

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, seconds on one clock.

    Attributes:
        start: sent.
        tokens: arrival of each token.
        prompt_tokens: of the prompt.
        error: why there is no answer; empty where there is one.
    """

    start: float
    tokens: list[float]
    prompt_tokens: int
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in pairwise(self.tokens)]


def percentile(values: list[float], percent: float) -> float:
    """The value that ``percent`` of the values don't exceed, between neighbours by proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values."""
    found = [value * 1e3 for value in values]
    if not found:
        return {}
    points = {f"p{percent}": round(percentile(found, percent), 3) for percent in PERCENTILES}
    return {"mean": round(sum(found) / len(found), 3)} | points


def summary(requests: list[Timed]) -> dict[str, Any]:
    """Rates over the whole run, and the spread of times in it."""
    done = [r for r in requests if not r.error and r.tokens]
    if not done:
        return {"requests": len(requests), "failed": len(requests)}
    seconds = max(r.tokens[-1] for r in done) - min(r.start for r in done)
    answered, read = sum(len(r.tokens) for r in done), sum(r.prompt_tokens for r in done)
    return {
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(answered / seconds, 1),
        "total_tokens_per_s": round((answered + read) / seconds, 1),
        "time_to_first_token_ms": spread(r.first for r in done),
        "time_between_tokens_ms": spread(gap for r in done for gap in r.gaps),
        "whole_answer_ms": spread(r.tokens[-1] - r.start for r in done),
    }


def record(model: str, machine: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a results file holds."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine or platform.processor() or platform.machine(),
        "version": __version__,
        "python": platform.python_version(),
        "model": model,
        "rows": rows,
    }


def save(path: Path, found: dict[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def lines(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = []
    for name, value in row.items():
        text = (
            "  ".join(f"{key} {number:g}" for key, number in value.items())
            if isinstance(value, dict)
            else str(value)
        )
        parts.append(f"{name.replace('_', ' '):<26}{text}")
    return "\n".join(parts)
