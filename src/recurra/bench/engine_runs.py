"""Measures an engine in this process: steps of a given batch, and many requests at once."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from recurra.bench.times import Timed, spread
from recurra.bench.workload import Call
from recurra.engine.engine import LLMEngine
from recurra.sampling_params import SamplingParams
from recurra.types import RequestOutput


def throughput(engine: LLMEngine, calls: list[Call]) -> list[Timed]:
    """Answer all calls, each as soon as its time has come; greedy, to the full length."""
    pending = list(reversed(calls))
    times: dict[str, list[float]] = {}
    starts: dict[str, float] = {}
    begin = time.perf_counter()
    while pending or engine.has_unfinished_requests():
        while pending and begin + pending[-1].at <= time.perf_counter():
            call, name = pending.pop(), f"bench-{len(starts)}"
            _ask(engine, name, call.prompt, call.max_tokens)
            times[name], starts[name] = [], max(begin + call.at, begin)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, begin + pending[-1].at - time.perf_counter()))
            continue
        _note(engine.step(), times)
    lengths = [len(call.prompt) for call in calls]
    return [
        Timed(starts[name], tokens, length)
        for (name, tokens), length in zip(times.items(), lengths, strict=True)
    ]


def latency(engine: LLMEngine, batch: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Times of ``batch`` equal requests that start together: the first tokens, and each step after them."""
    last = min(4095, engine.runner.model.vocab_size - 1)
    calls = [
        Call(0.0, [1 + (7 * i + 31 * t) % last for t in range(input_len)], output_len) for i in range(batch)
    ]
    for i, call in enumerate(calls):
        _ask(engine, f"bench-{i}", call.prompt, call.max_tokens)
    start = time.perf_counter()
    times: dict[str, list[float]] = {f"bench-{i}": [] for i in range(batch)}
    while engine.has_unfinished_requests():
        _note(engine.step(), times)
    begun = max(tokens[0] for tokens in times.values())
    together = sorted({t for tokens in times.values() for t in tokens if t >= begun})
    steps = [b - a for a, b in pairwise(together)]
    row: dict[str, Any] = {
        "batch": batch, "input_tokens": input_len, "output_tokens": output_len,
        "first_tokens_ms": round((begun - start) * 1e3, 3), "step_ms": spread(steps),
    }  # fmt: skip
    if steps:
        row["output_tokens_per_s"] = round(batch * len(steps) / sum(steps), 1)
    return row


def _ask(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def _note(outputs: list[RequestOutput], times: dict[str, list[float]]) -> None:
    """Give the tokens that came with a step its time."""
    now = time.perf_counter()
    for output in outputs:
        seen = times[output.request_id]
        seen.extend([now] * (len(output.outputs[0].token_ids) - len(seen)))


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least that a decode step moves, and how fast this device moves bytes.

    Attributes:
        weight_bytes: read once a step.
        state_bytes: of one sequence, read and written once a step.
        copy_rate: bytes a second, read plus written, of a large copy.
    """

    weight_bytes: int
    state_bytes: int
    copy_rate: float

    @classmethod
    def measure(cls, engine: LLMEngine) -> Roofline:
        """Of an engine's model on its device."""
        model = engine.runner.model
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return cls(weights, engine.runner.pool.bytes_per_slot, copy_rate(engine.runner.device))

    def floor_ms(self, batch: int) -> float:
        """Milliseconds that a step of ``batch`` sequences takes at the rate of a copy."""
        return (self.weight_bytes + 2 * self.state_bytes * batch) / self.copy_rate * 1e3

    def beside(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of :func:`latency` with its floor."""
        floor = self.floor_ms(row["batch"])
        found = row | {"floor_ms": round(floor, 3)}
        if row["step_ms"]:
            found["times_floor"] = round(row["step_ms"]["p50"] / floor, 2)
        return found


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read plus written, of a copy that no cache holds."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
