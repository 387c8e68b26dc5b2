"""Replays traces with and without kept states: what was spared, and whether the answers are the same."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recurra.bench.traces import Trace
from recurra.config.engine import EngineConfig
from recurra.engine.engine import LLMEngine
from recurra.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """What one trace gave.

    Attributes:
        calls, prompt_tokens: of the trace.
        reusable_tokens: tokens that a prompt shares with an earlier prompt and its answer, its last one left out.
        reused_tokens: tokens that were not computed.
        hit_rate: reused of reusable.
        prefill_saved: reused of all prompt tokens.
        ttft_cached_ms, ttft_cold_ms: median over the calls that found a state, with it and without.
        device_bytes, disk_bytes: kept a conversation on each tier, when all is done.
        state_bytes: of one state.
        other_answers: greedy answers that differ from those computed without kept states.
    """

    trace: str
    calls: int
    conversations: int
    prompt_tokens: int
    reusable_tokens: int
    reused_tokens: int
    hit_rate: float
    prefill_saved: float
    ttft_cached_ms: float
    ttft_cold_ms: float
    device_bytes: int
    disk_bytes: int
    state_bytes: int
    other_answers: int


@dataclass(frozen=True, slots=True)
class _Reply:
    prompt: list[int]
    tokens: list[int]
    cached: int
    first_ms: float


def replay(trace: Trace, settings: dict[str, Any]) -> Row:
    """Play a trace against two engines, one of which keeps states, on the device and in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        warm = LLMEngine(EngineConfig(**settings, prefix_cache_dir=folder))
        warm.warm_up()
        replies = _play(trace, warm)
        assert warm.cache is not None, "the engine keeps states"
        warm.cache.tiers.flush()
        stats, state_bytes = warm.stats(), warm.cache.tiers.rows.bytes_per_row
        warm.close()
    cold = LLMEngine(EngineConfig(**settings, enable_prefix_caching=False))
    cold.warm_up()
    plain = [_ask(cold, reply.prompt, len(reply.tokens)) for reply in replies]
    hits = [n for n, reply in enumerate(replies) if reply.cached]
    prompt, reusable = sum(len(r.prompt) for r in replies), sum(_reusable(replies))
    reused, conversations = sum(r.cached for r in replies), len({c.conversation for c in trace.calls})
    return Row(
        trace.name, len(replies), conversations, prompt, reusable, reused,
        round(reused / reusable, 4), round(reused / prompt, 4),
        round(statistics.median(replies[n].first_ms for n in hits), 3),
        round(statistics.median(plain[n].first_ms for n in hits), 3),
        stats.device_state_bytes // conversations, stats.disk_state_bytes // conversations, state_bytes,
        sum(a.tokens != b.tokens for a, b in zip(replies, plain, strict=True)),
    )  # fmt: skip


def _play(trace: Trace, engine: LLMEngine) -> list[_Reply]:
    replies: list[_Reply] = []
    for call in trace.calls:
        prompt: list[int] = []
        for part in call.parts:
            kind, _, number = part.partition(":")
            prompt += replies[int(number)].tokens if kind == "answer" else trace.pieces[part]
        replies.append(_ask(engine, prompt, call.max_tokens))
    return replies


def _ask(engine: LLMEngine, prompt: list[int], max_tokens: int) -> _Reply:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start, first = time.perf_counter(), 0.0
    engine.add_request("x", prompt, params)
    while True:
        for output in engine.step():
            first = first or time.perf_counter() - start
            if output.finished:
                return _Reply(prompt, output.outputs[0].token_ids, output.num_cached_tokens, first * 1e3)


def _reusable(replies: list[_Reply]) -> list[int]:
    """For each prompt, the longest beginning that an earlier text has, its last token left out."""
    found, texts = [], list[list[int]]()
    for reply in replies:
        shared = max((_common(text, reply.prompt) for text in texts), default=0)
        found.append(min(shared, len(reply.prompt) - 1))
        texts.append(reply.prompt + reply.tokens)
    return found


def _common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def table(rows: list[Row]) -> str:
    """The figures for a terminal."""
    lines = [
        f"{'trace':16}{'calls':>6}{'prompt':>9}{'reusable':>9}{'reused':>8}{'saved':>7}"
        f"{'TTFT ms':>9}{'cold':>8}{'KiB/conv device':>17}{'disk':>7}{'differ':>8}"
    ]
    lines += [
        f"{r.trace:16}{r.calls:>6}{r.prompt_tokens:>9}{r.reusable_tokens:>9}{r.hit_rate:>8.1%}"
        f"{r.prefill_saved:>7.1%}{r.ttft_cached_ms:>9.1f}{r.ttft_cold_ms:>8.1f}"
        f"{r.device_bytes / 1024:>17.0f}{r.disk_bytes / 1024:>7.0f}{r.other_answers:>8}"
        for r in rows
    ]
    return "\n".join(lines)


def as_record(rows: list[Row]) -> list[dict[str, Any]]:
    """The figures for a file."""
    return [asdict(row) for row in rows]


def plot(rows: list[Row], path: Path) -> None:
    """Reused tokens and time to the first token, a bar a trace.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names, places = [row.trace for row in rows], range(len(rows))
    left.bar(names, [100 * row.hit_rate for row in rows], color="#4477aa")
    left.axhline(95, color="black", linewidth=0.8, linestyle="--")
    left.set_ylabel("% of reusable tokens reused")
    left.set_ylim(0, 100)
    width = 0.4
    right.bar(
        [n - width / 2 for n in places],
        [row.ttft_cold_ms for row in rows],
        width,
        label="cold",
        color="#bbbbbb",
    )
    right.bar(
        [n + width / 2 for n in places],
        [row.ttft_cached_ms for row in rows],
        width,
        label="cached",
        color="#4477aa",
    )
    right.set_xticks(list(places), names)
    right.set_ylabel("median time to first token, ms")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
