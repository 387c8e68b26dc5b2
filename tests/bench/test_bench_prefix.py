"""The prefix benchmark: its traces are the repository's, and its figures come from what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoints
from recurra.bench.prefix import as_record, plot, replay, table
from recurra.bench.traces import KINDS, Trace, TraceCall, make_trace

KEPT = Path(__file__).parents[2] / "benchmarks" / "traces"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_kept_traces_are_those_that_the_script_draws(kind: str) -> None:
    kept = Trace.load(KEPT / f"{kind}.json")
    assert kept == make_trace(kind)
    assert kept != make_trace(kind, seed=1)
    known = set(kept.pieces) | {f"answer:{n}" for n in range(len(kept.calls))}
    assert {part for call in kept.calls for part in call.parts} <= known


def test_a_replay_counts_what_was_spared(tmp_path: Path) -> None:
    folder = checkpoints.write_mamba2(tmp_path / "model", tokenizer=False)
    trace = Trace("small", {"a": [*range(20, 60)], "b": [7] * 12, "c": [9] * 12})
    trace.calls = [
        TraceCall(0, ["a"], 12),
        TraceCall(0, ["a", "answer:0", "b"], 4),
        TraceCall(0, ["a", "answer:0", "c"], 4),
        TraceCall(1, ["b", "a"], 4),
    ]
    settings = {
        "model": str(folder),
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
    }
    row = replay(trace, settings)
    assert (row.calls, row.conversations, row.prompt_tokens) == (4, 2, 40 + 64 + 64 + 52)
    assert (
        row.reusable_tokens == 52 + 52
    )  # two turns after the first; the last call begins with something new
    assert row.reused_tokens == 51 + 51  # an answer's last token is never computed
    assert row.hit_rate == round(102 / 104, 4)
    assert row.other_answers == 0
    assert row.disk_bytes >= row.device_bytes > row.state_bytes
    assert "small" in table([row])
    json.dumps(as_record([row]))
    plot([row], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
