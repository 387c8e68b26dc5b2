"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's load and of what it did since it started.

    Attributes:
        running: sequences that hold a slot.
        waiting: sequences that are ready and find no room.
        free_slots, used_slots: states that are free and taken; together ``num_slots``.
        free_pages, used_pages: pages of attention caches; none in a pure recurrent model.
        prompt_tokens: prompt tokens computed.
        generation_tokens: answer tokens delivered.
        cached_tokens: prompt tokens taken from a cache instead of being computed.
        steps: model steps.
        finished: answers that ended, by finish reason.
        errors: those with "error".
    """

    running: int
    waiting: int
    free_slots: int
    used_slots: int
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    steps: int
    finished: dict[str, int]
    errors: int
    free_pages: int = 0
    used_pages: int = 0

    @property
    def num_slots(self) -> int:
        return self.free_slots + self.used_slots


@dataclass(slots=True)
class Counters:
    """What only grows, kept by the engine."""

    prompt_tokens: int = 0
    steps: int = 0
