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
        preemptions: how often a sequence gave its pages to an older one, and waited.
        prompt_tokens: prompt tokens computed.
        generation_tokens: answer tokens delivered.
        cached_tokens: prompt tokens taken from a cache instead of being computed.
        steps: model steps.
        finished: answers that ended, by finish reason.
        errors: those with "error".
        prefix_hit: prompts that began from a kept state.
        prefix_no_snapshot: prompts whose beginning was never kept.
        prefix_evicted: prompts whose kept state was given up for want of room.
        prefix_salted_away: prompts whose beginning is kept under another salt.
        prefix_pages_gone: prompts whose kept state lost its pages of keys and values.
        prefix_prompt_logprobs: prompts computed whole because every position's log-probability was wanted.
        kept_states: states that are kept, wherever.
        device_state_bytes, host_state_bytes, disk_state_bytes: what they take.
        states_given_up: kept states that went for want of room.
        states_damaged: files of states that were left aside.
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
    preemptions: int = 0
    prefix_hit: int = 0
    prefix_no_snapshot: int = 0
    prefix_evicted: int = 0
    prefix_salted_away: int = 0
    prefix_pages_gone: int = 0
    prefix_prompt_logprobs: int = 0
    kept_states: int = 0
    device_state_bytes: int = 0
    host_state_bytes: int = 0
    disk_state_bytes: int = 0
    states_given_up: int = 0
    states_damaged: int = 0

    @property
    def num_slots(self) -> int:
        return self.free_slots + self.used_slots


@dataclass(slots=True)
class Counters:
    """What only grows, kept by the engine."""

    prompt_tokens: int = 0
    steps: int = 0
