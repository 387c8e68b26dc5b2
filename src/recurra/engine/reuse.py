"""Which prompts begin from a kept state, and where states are kept. Policy only: no tensor, no torch.

The scheduler calls it at four points: a request is admitted (begin where?), a prompt is cut into pieces
(end where at the latest?), a piece is computed (keep the state?), an answer ends (keep it too).

States are kept one token before a prompt's end, so that the same prompt again computes one token; at an
answer's end, from which the next turn goes on; where a prompt parts from others that are known; and at
multiples of an interval in long prompts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from recurra.cache.prefix import Entry, Match, PrefixTree, pack
from recurra.types import Request, Sequence

#: A state is kept only this many tokens after the one before it: less isn't worth a step of its own.
LEAST_GAIN = 8

#: How a lookup went.
Reason = Literal["hit", "no_snapshot", "evicted", "salted_away", "pages_gone", "prompt_logprobs"]
REASONS: tuple[Reason, ...] = (
    "hit", "no_snapshot", "evicted", "salted_away", "pages_gone", "prompt_logprobs",
)  # fmt: skip

Snapshot = Any


class Shelf(Protocol):
    """Where states are kept."""

    def keep(self, entry: Entry, sequence: Sequence) -> bool:
        """Copy the state of a sequence, which holds a slot; False: no room, and the entry is gone."""

    def begin(self, entry: Entry, sequence: Sequence) -> Snapshot | None:
        """What the next step loads into the slot; the sequence has its pages. None: it was damaged, and the
        entry is gone; or it is still there, and pages for it can't be had."""

    def use(self, entry: Entry) -> None:
        """Note that it was used."""

    def drop(self, entry: Entry, why: Literal["evicted", "pages_gone"]) -> None:
        """Give it up."""


@dataclass(slots=True)
class _Course:
    """A running prompt: where its pieces must end, and what it began from."""

    space: str
    packed: bytes
    stops: list[int]  # descending
    kept: int  # the last position that is kept
    source: Entry | None = None


@dataclass(slots=True)
class ReuseStats:
    """What the cache did since the counters began."""

    reasons: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    kept: int = 0
    not_kept: int = 0


class PrefixReuse:
    """Begins prompts from kept states, and keeps states.

    Args:
        tree: what is kept.
        shelf: where.
        interval: tokens between states inside a long prompt; 0: none there.
    """

    def __init__(self, tree: PrefixTree, shelf: Shelf, interval: int) -> None:
        self.tree, self.interval = tree, interval
        self.active = True
        self.least_gain = LEAST_GAIN
        self.stats = ReuseStats()
        self._shelf = shelf
        self._courses: dict[Sequence, _Course] = {}
        self._ahead: frozenset[Sequence] = frozenset()
        self._hits: list[tuple[str, int]] = []

    def admit(self, sequence: Sequence) -> Snapshot | None:
        """What a sequence that was just given a slot begins from; ``num_computed`` says how far that is."""
        if not self.active:
            return None
        request = sequence.request
        space, packed = space_of(request), pack(request.prompt_token_ids)
        limit = sequence.num_prompt - 1  # one token is computed, for its logits
        entry, match, snapshot = self._look(sequence, space, packed, limit)
        start = entry.position if entry is not None else 0
        stops = self._stops(start, limit, match.common)
        self._courses[sequence] = _Course(space, packed, stops, start, entry)
        if entry is not None:
            sequence.num_computed = start
            self.stats.cached_tokens += start
            self._hits.append((request.request_id, start))
        return snapshot

    def next_stop(self, sequence: Sequence) -> int:
        """Where a prompt's next piece must end at the latest."""
        course = self._courses.get(sequence)
        return course.stops[-1] if course is not None and course.stops else sequence.num_prompt

    def computed(self, sequence: Sequence) -> None:
        """Keep the state after a piece, if it ends where one is wanted."""
        course = self._courses.get(sequence)
        if course is not None and course.stops and course.stops[-1] == sequence.num_computed:
            course.stops.pop()
            course.kept = sequence.num_computed
            self._keep(sequence, course.space, course.packed, sequence.num_computed)

    def finish(self, sequence: Sequence) -> None:
        """Keep the state at an answer's end; its last token isn't computed, unless the next step ran already."""
        if not self.active:
            return
        course = self._courses.get(sequence)
        kept = course.kept if course is not None else sequence.num_prompt - 1
        position = sequence.num_computed + (sequence in self._ahead)
        assert position <= len(sequence.token_ids), (position, len(sequence.token_ids))
        if position - kept >= self.least_gain:
            self._keep(sequence, space_of(sequence.request), pack(sequence.token_ids[:position]), position)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._courses.pop(sequence, None)

    def distrust(self, sequences: Iterable[Sequence]) -> None:
        """These failed: nothing of them is kept, and what they began from is given up."""
        for sequence in sequences:
            course = self._courses.get(sequence)
            source = course.source if course is not None else None
            if source is not None and source.live and source.pins == 0:
                self._shelf.drop(source, "evicted")
            self._courses[sequence] = _Course("", b"", [], len(sequence.token_ids) + 1)

    def ran_ahead(self, sequences: Iterable[Sequence]) -> None:
        """Those whose states have seen one token more than ``num_computed`` says."""
        self._ahead = frozenset(sequences)

    def take_hits(self) -> list[tuple[str, int]]:
        """Request ids, and the tokens that each was spared, since the last call."""
        hits, self._hits = self._hits, []
        return hits

    def _look(
        self, sequence: Sequence, space: str, packed: bytes, limit: int
    ) -> tuple[Entry | None, Match, Snapshot | None]:
        """The deepest state that can be had, counted by how it went."""
        match = self.tree.lookup(space, packed, limit)
        if sequence.request.params.prompt_logprobs is not None:  # every position's logits are wanted
            self.stats.reasons["prompt_logprobs"] += 1
            return None, match, None
        while match.entry is not None:
            match.entry.hits += 1
            snapshot = self._shelf.begin(match.entry, sequence)
            if snapshot is not None:
                self._shelf.use(match.entry)
                self.stats.reasons["hit"] += 1
                return match.entry, match, snapshot
            if match.entry.live:
                self.stats.reasons["pages_gone"] += 1
                return None, match, None
            match = self.tree.lookup(space, packed, limit)
        self.stats.reasons[self._miss(space, packed, limit, match)] += 1
        return None, match, None

    def _miss(self, space: str, packed: bytes, limit: int, match: Match) -> Reason:
        if match.lost is not None:
            return match.lost
        return "salted_away" if self.tree.held_elsewhere(space, packed, limit) else "no_snapshot"

    def _stops(self, start: int, end: int, common: int) -> list[int]:
        """Where states are wanted after ``start``, the last first."""
        wanted = {end, min(common, end)}
        if self.interval:
            wanted.update(range(start - start % self.interval + self.interval, end, self.interval))
        stops, before = [], start
        for stop in sorted(wanted):
            if stop - before >= self.least_gain:
                stops.append(stop)
                before = stop
        return stops[::-1]

    def _keep(self, sequence: Sequence, space: str, packed: bytes, position: int) -> None:
        entry = self.tree.insert(space, packed, position)
        if self._shelf.keep(entry, sequence):
            self.stats.kept += 1
        else:
            self.stats.not_kept += 1


class NoReuse:
    """Where every prompt is computed whole."""

    def admit(self, sequence: Sequence) -> None:
        """Nothing."""

    def next_stop(self, sequence: Sequence) -> int:
        """The prompt's end."""
        return sequence.num_prompt

    def computed(self, sequence: Sequence) -> None:
        """Nothing."""

    def finish(self, sequence: Sequence) -> None:
        """Nothing."""


def space_of(request: Request) -> str:
    """Whose texts a request sees: those of its salt. The model is the tree's own."""
    return space_of_salt(request.cache_salt)


def space_of_salt(salt: str | None) -> str:
    """The name of a salt's space, from which the salt can't be told."""
    return "" if salt is None else hashlib.sha256(salt.encode()).hexdigest()[:32]
