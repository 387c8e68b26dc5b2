"""Pictures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recurra.bench.times import Timed


def _figure(path: Path, xlabel: str, ylabel: str, curves: dict[str, tuple[list[float], list[float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in curves.items():
        axes.plot(x, y, marker="o" if len(x) < 20 else "", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def plot_latency(path: Path, rows: list[dict[str, Any]]) -> None:
    """Step times over batch sizes, with their floors where these were measured."""
    timed = [row for row in rows if row["step_ms"]]
    batches = [float(row["batch"]) for row in timed]
    curves = {"median step": (batches, [row["step_ms"]["p50"] for row in timed])}
    if timed and "floor_ms" in timed[0]:
        curves["floor"] = (batches, [row["floor_ms"] for row in timed])
    _figure(path, "sequences", "ms", curves)


def plot_requests(path: Path, requests: list[Timed]) -> None:
    """Share of requests that had their first token, and of tokens that had come, within a time."""
    done = [r for r in requests if not r.error and r.tokens]
    found = {
        "first token": sorted(r.first * 1e3 for r in done),
        "between tokens": sorted(gap * 1e3 for r in done for gap in r.gaps),
    }
    _figure(
        path, "ms", "share",
        {name: (x, [(i + 1) / len(x) for i in range(len(x))]) for name, x in found.items() if x},
    )  # fmt: skip
