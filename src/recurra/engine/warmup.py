"""Everything that a request can reach, run once before the engine says that it is ready."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from recurra.engine.graphs import GraphForward
from recurra.sampling_params import SamplingParams

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine
    from recurra.engine.loading import Progress

log = logging.getLogger("recurra")

_PREFIX = "warm-up"


def warm_up(engine: LLMEngine, progress: Progress | None = None) -> None:
    """Run real requests of every shape class through an idle engine, then start its counters anew.

    Prompts of one token, of part of a kernel chunk, of several chunks and of more than a step; one
    sequence and many; greedy and drawn; penalties, filters and log-probabilities.
    """
    assert not engine.has_unfinished_requests(), "the engine is warmed up before it serves"
    start = time.perf_counter()
    _record_graphs(engine, progress)
    stages = _stages(engine)
    for done, (name, requests) in enumerate(stages):
        if progress is not None:
            progress(f"warm-up: {name}", done, len(stages))
        for number, (length, params) in enumerate(requests):
            engine.add_request(f"{_PREFIX}-{number}", [0] * length, params)
        while engine.has_unfinished_requests():
            engine.step()
    engine.reset_stats()
    if progress is not None:
        progress("warm-up", len(stages), len(stages))
    log.info("warm-up took %.1f s", time.perf_counter() - start)


def _record_graphs(engine: LLMEngine, progress: Progress | None) -> None:
    """Record the decode steps of every batch size, where this device has graphs."""
    forward = engine.runner.forward
    if not isinstance(forward, GraphForward):
        return
    sizes = forward.missing
    for done, size in enumerate(sizes):
        if progress is not None:
            progress(f"warm-up: decode steps of {size} sequences", done, len(sizes))
        forward.record(size)


def _stages(engine: LLMEngine) -> list[tuple[str, list[tuple[int, SamplingParams]]]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0)
    everything = SamplingParams(
        n=2, max_tokens=3, ignore_eos=True, seed=0, top_k=3, top_p=0.9, min_p=0.01, presence_penalty=0.1,
        repetition_penalty=1.1, logprobs=1, prompt_logprobs=1, logit_bias={0: 0.5}, min_tokens=1,
    )  # fmt: skip
    chunk = engine.runner.model.chunk_size
    longest = engine.max_model_len - 3
    lengths = [n for n in (1, 2, chunk - 1, 2 * chunk + 1) if 0 < n <= longest]
    many = min(engine.limits.max_num_seqs, 8)
    if longest < 1:
        return []
    return [
        ("one token", [(1, greedy)]),
        ("prompts", [(n, greedy) for n in lengths]),
        ("sampling", [(lengths[-1], everything), (1, SamplingParams(max_tokens=3, seed=0))]),
        ("many sequences", [(1 + n % lengths[-1], greedy) for n in range(many)]),
    ]
