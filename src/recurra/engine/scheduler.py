"""What the next step computes, and who holds a slot. Policy only: no tensor, no torch.

A sequence is *waiting* (queued, no slot), *prefilling* or *decoding* (both hold a slot), or finished.
Slots never run out: what finds none free waits. Answers 2 to n of a request wait for the first one's
prompt and take their first token from its logits. Those whose turn it is and who find a slot then get a
fork of its state; the others join the queue with a snapshot of it.

Pages of keys and values (in models with attention) grow with a sequence and may run out. Then the youngest
sequence is preempted: it goes back to its place in the queue with a snapshot, and goes on from it later as if
nothing had been. One that has no token of its answer yet may be computed anew instead, where that is cheaper.

>>> plan = scheduler.schedule(states)
>>> scheduler.commit(plan, tokens, finished, states)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from recurra.cache.alloc import SlotAllocator
from recurra.config.scheduler import SchedulerLimits
from recurra.engine.paging import Paging
from recurra.engine.queue import Entry, Snapshot, WaitingQueue
from recurra.engine.reuse import NoReuse
from recurra.errors import QueueFullError, RequestError
from recurra.types import SCRATCH_SLOT, Request, Sequence, Status


class States(Protocol):
    """What can be done with the state of a sequence that holds a slot, and perhaps pages."""

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Copy the state of one into the slot of another, and into those pages that they don't share."""

    def save(self, sequence: Sequence) -> Snapshot:
        """Copy a state and the pages of what is computed out, where they take neither slot nor page."""

    def clear(self, sequence: Sequence) -> None:
        """Leave nothing in the slot."""


class Reuse(Protocol):
    """Where prompts begin, and where their pieces end: see :mod:`recurra.engine.reuse`."""

    def admit(self, sequence: Sequence) -> Snapshot | None:
        """A state to begin from; ``sequence.num_computed`` is set to what it has seen.

        In a model with attention ``sequence.pages`` is set too, with a holder more for each page, and a page for
        the next token can be had.
        """

    def next_stop(self, sequence: Sequence) -> int:
        """Where the next piece must end at the latest."""

    def computed(self, sequence: Sequence) -> None:
        """A piece of the prompt is computed and its state in the slot."""

    def finish(self, sequence: Sequence) -> None:
        """The answer is complete, and its state still in the slot."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of one prompt.

    Attributes:
        sequence: the request's first answer, which computes the prompt for all.
        start: tokens computed before; 0 means that the slot's content is nobody's.
        length: tokens of this piece.
        answers: every answer that waits for this prompt, the first one included.
    """

    sequence: Sequence
    start: int
    length: int
    answers: tuple[Sequence, ...]

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """The prompt is done after this piece, and each answer gets its first token."""
        return self.end == self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: states to load first, then decode rows and prompt pieces, computed together."""

    restores: tuple[tuple[Sequence, Snapshot], ...]
    decode: tuple[Sequence, ...]
    prefill: tuple[PrefillChunk, ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)


@dataclass(slots=True)
class _Live:
    """An unfinished request: its answers and its place in the order of arrival."""

    order: int
    sequences: tuple[Sequence, ...]


def _is_decode(sequence: Sequence) -> bool:
    """Whether a started prompt's last token can be computed like a token of its answer, which costs less."""
    params = sequence.request.params
    alone = params.n == 1 and params.prompt_logprobs is None
    return alone and 0 < sequence.num_computed == sequence.num_prompt - 1


def _nothing(sequence: Sequence) -> None:
    """Called at a sequence's end where nobody asked to know."""


class Scheduler:
    """Continuous batching under a token budget, first come first served within a priority.

    Args:
        limits: sequences and tokens of a step, and the queue's length.
        slots: who holds what.
        on_finish: called with each sequence that ends, for whatever reason, while it still has its slot.
        reuse: begins prompts from kept states; None: all are computed whole.
        paging: who holds which pages; None: the model has none.

    Attributes:
        num_preemptions: how often a sequence had to give way.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        slots: SlotAllocator,
        on_finish: Callable[[Sequence], None] = _nothing,
        reuse: Reuse | None = None,
        paging: Paging | None = None,
    ) -> None:
        self.limits = limits
        self.paging = paging or Paging.none()
        self.num_preemptions = 0
        self._reuse: Reuse = reuse or NoReuse()
        self.slots = slots
        self._on_finish = on_finish
        self._live: dict[str, _Live] = {}
        self._queue = WaitingQueue()
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._arrivals = 0

    # ---- what is there ----

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that are ready to run and find no room."""
        return self._queue.num_waiting

    @property
    def num_waiting_new(self) -> int:
        """Of those, requests that were never started: what ``max_queue_len`` limits."""
        return self._queue.num_new

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    # ---- coming and going ----

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Queue a request; returns its n answers to be.

        Raises:
            QueueFullError: as many requests wait as ``max_queue_len`` allows.
            RequestError: its id is in use, or it could never have its pages.
        """
        if request.request_id in self._live:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; wait until it finished, or choose another",
                param="request_id",
            )
        self.paging.refuse_what_never_fits(request)
        self.check_queue()
        prompt = list(request.prompt_token_ids)
        sequences = tuple(Sequence(request, index, prompt.copy()) for index in range(request.params.n))
        self._live[request.request_id] = _Live(self._arrivals, sequences)
        self._arrivals += 1
        self._enqueue(sequences[0], None)
        return sequences

    def check_queue(self) -> None:
        """Raise QueueFullError where one more request would be one too many."""
        limit = self.limits.max_queue_len
        if limit is not None and self._queue.num_new >= max(limit, 1):
            raise QueueFullError(limit)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if it isn't live. Its slots are free on return."""
        live = self._live.get(request_id)
        if live is None:
            return False
        for sequence in live.sequences:
            if sequence.status is not Status.FINISHED:
                self._finish(sequence)
        self._queue.compact()
        return True

    # ---- the step ----

    def schedule(self, states: States) -> Plan:
        """Choose the next step's rows: decoding first, then started prompts, then the queue.

        Where decoding alone would fill the budget, a quarter is kept for prompts, and the decoding
        sequences take turns. Where pages are short the youngest sequences are preempted, and nobody is admitted.

        Args:
            states: saves and clears the states of those that are preempted.
        """
        preemptions = self.num_preemptions
        budget = self.limits.max_num_batched_tokens
        for sequence in [s for s in self._prefilling if _is_decode(s)]:
            del self._prefilling[sequence]
            self._decoding[sequence] = None
        reserve = max(1, budget // 4) if self._prefilling or self._can_admit() else 0
        decode = self._with_pages(self._take_turns(budget - reserve), states)
        budget -= len(decode)
        chunks: list[PrefillChunk] = []
        for sequence in list(self._prefilling):
            if budget > 0 and sequence.status is Status.RUNNING and self._make_room(sequence, states):
                budget -= self._append_chunk(chunks, sequence, budget)
        if self.num_preemptions > preemptions:
            decode = [s for s in decode if s.status is Status.RUNNING]
            chunks = [c for c in chunks if c.sequence.status is Status.RUNNING]
            return Plan((), tuple(decode), tuple(chunks)) or self._oldest_alone(states)
        restores = []
        while budget > 0 and self._can_admit():
            entry = self._admit()
            kept = self._reuse.admit(entry.sequence) if entry.snapshot is None else entry.snapshot
            if kept is not None:
                restores.append((entry.sequence, kept))
            if entry.sequence in self._prefilling and not _is_decode(entry.sequence):
                budget -= self._append_chunk(chunks, entry.sequence, budget)
            else:
                self._prefilling.pop(entry.sequence, None)
                self._decoding[entry.sequence] = None
                decode.append(entry.sequence)
                budget -= 1
        if not decode and not chunks and self.num_running:
            return self._oldest_alone(states)
        return Plan(tuple(restores), tuple(decode), tuple(chunks))

    def ahead(self, plan: Plan) -> Plan | None:
        """The step after one that isn't committed yet; None where its tokens decide what that is.

        It can be told while nobody but the plan's decode rows runs or could start. Rows that end with the step
        for another reason than their length are computed once too often, and their tokens thrown away.

        Args:
            plan: what :meth:`schedule` or this method returned last.
        """
        rows = [s for s in plan.decode if s.status is Status.RUNNING]
        if plan.prefill or self._prefilling or len(rows) != len(self._decoding) or self._can_admit():
            return None
        going_on = tuple(
            s for s in rows if len(s.token_ids) + 1 - s.num_prompt < (s.request.params.max_tokens or 0)
        )
        if not all(self.paging.grow(s, s.num_computed + 2) for s in going_on):
            return None
        return Plan((), going_on, ()) if going_on else None

    def commit(
        self,
        plan: Plan,
        tokens: Mapping[Sequence, int],
        finished: Collection[Sequence],
        states: States,
    ) -> None:
        """Record what a step did; nothing is recorded for sequences aborted since it was planned.

        Args:
            plan: what :meth:`schedule` returned last.
            tokens: the new token of each sequence that got one.
            finished: sequences that end with this step.
            states: copies the state after a prompt for the further answers that still need it.
        """
        for sequence in plan.decode:
            if sequence.status is Status.RUNNING:
                sequence.num_computed += 1
        ended = set(finished)
        for chunk in plan.prefill:
            if chunk.sequence.status is Status.RUNNING:
                self._advance(chunk)
                if chunk.sequence not in ended:
                    self._reuse.computed(chunk.sequence)
        for sequence, token in tokens.items():
            if sequence.status is not Status.FINISHED:
                sequence.token_ids.append(token)
        for chunk in plan.prefill:
            if chunk.is_last:  # before anybody ends: the first answer's state may be about to go
                self._spread(chunk, [a for a in chunk.answers[1:] if a not in ended], states)
        for sequence in finished:
            if sequence.status is Status.RUNNING:
                self._reuse.finish(sequence)
            if sequence.status is not Status.FINISHED:
                self._finish(sequence)
        self.check(plan)

    def check(self, plan: Plan | None = None) -> None:
        """Assert the invariants: of a plan's sequences, and of the whole when nothing runs."""
        assert self.slots.num_used == self.num_running, (self.slots.num_used, self.num_running)
        assert self.num_running <= self.limits.max_num_seqs
        for sequence in plan.decode if plan else ():
            sequence.check()
        for chunk in plan.prefill if plan else ():
            chunk.sequence.check()
        if not self._live:
            assert self.num_waiting == self.num_waiting_new == self.num_running == 0, self
            self.slots.check()
            self.paging.allocator.check()

    # ---- parts of a step ----

    def _take_turns(self, room: int) -> list[Sequence]:
        """Up to ``room`` decoding sequences; those that ran go to the end if not all could."""
        chosen = list(self._decoding)[:room]
        if len(chosen) < len(self._decoding):
            for sequence in chosen:
                del self._decoding[sequence]
                self._decoding[sequence] = None
        return chosen

    def _append_chunk(self, chunks: list[PrefillChunk], sequence: Sequence, budget: int) -> int:
        start = sequence.num_computed
        length = min(budget, self._reuse.next_stop(sequence) - start)
        if not self.paging.grow(sequence, start + length):
            length = self.paging.within_reach(sequence) - start
            assert length > 0, "room was made for one token"
            self.paging.grow(sequence, start + length)
        answers = self._live[sequence.request.request_id].sequences
        chunks.append(PrefillChunk(sequence, start, length, answers))
        return length

    def _advance(self, chunk: PrefillChunk) -> None:
        chunk.sequence.num_computed = chunk.end
        if chunk.is_last:
            del self._prefilling[chunk.sequence]
            self._decoding[chunk.sequence] = None

    def _spread(self, chunk: PrefillChunk, answers: list[Sequence], states: States) -> None:
        """Give the state after a prompt to its further answers: into a slot, or into the queue."""
        snapshot: Snapshot = None
        for answer in answers:
            if answer.status is Status.FINISHED:
                continue
            answer.num_computed = chunk.end
            if snapshot is None and self._is_next(answer) and self.paging.can_fork(chunk.sequence):
                self._hold(answer, self._decoding)
                self.paging.fork(chunk.sequence, answer)
                states.fork(chunk.sequence, answer)
                continue
            if snapshot is None:
                snapshot = states.save(chunk.sequence)
            self._enqueue(answer, snapshot)

    # ---- pages ----

    def _with_pages(self, decode: list[Sequence], states: States) -> list[Sequence]:
        """Those that have, or can get, the page of their next token. The youngest may have to stand still."""
        if not self.paging.is_used:
            return decode
        short = [s for s in decode if not self.paging.grow(s, s.num_computed + 1)]
        for sequence in sorted(short, key=self._age):
            if sequence.status is Status.RUNNING:
                self._make_room(sequence, states)
        return [s for s in decode if s.status is Status.RUNNING and self.paging.holds(s, s.num_computed + 1)]

    def _oldest_alone(self, states: States) -> Plan:
        """A step of one sequence: those whose turn it was lack pages, and whoever may take them had no turn."""
        oldest = min((*self._prefilling, *self._decoding), key=self._age)
        chunks: list[PrefillChunk] = []
        if not self._make_room(oldest, states):
            return Plan((), (), ())
        if oldest in self._decoding:
            return Plan((), (oldest,), ())
        self._append_chunk(chunks, oldest, self.limits.max_num_batched_tokens)
        return Plan((), (), tuple(chunks))

    def _make_room(self, sequence: Sequence, states: States) -> bool:
        """Get a running sequence the page of its next token, from younger ones if need be."""
        while not self.paging.grow(sequence, sequence.num_computed + 1):
            holders = (s for s in (*self._prefilling, *self._decoding) if s.pages)
            youngest = max(holders, key=self._age, default=sequence)
            if self._age(youngest) <= self._age(sequence):
                return False
            self._preempt(youngest, states)
        return True

    def _preempt(self, sequence: Sequence, states: States) -> None:
        """Put a running sequence back to its place in the queue."""
        begun = len(sequence.token_ids) > sequence.num_prompt
        scored = sequence.request.params.prompt_logprobs is not None  # what was given isn't given again
        anew = not begun and not scored and self.paging.cost.is_above_computing(sequence)
        snapshot = None if anew else states.save(sequence)
        states.clear(sequence)
        self._let_go(sequence)
        sequence.status = Status.WAITING
        if anew:
            sequence.num_computed = 0
        self.num_preemptions += 1
        self._enqueue(sequence, snapshot)

    def _let_go(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)
        self.slots.free(sequence.slot)
        sequence.slot = SCRATCH_SLOT
        self.paging.release(sequence)

    # ---- the queue ----

    def _age(self, sequence: Sequence) -> tuple[int, int, int]:
        """What sequences are ordered by: the least goes first, and gives way last."""
        request = sequence.request
        return request.priority, self._live[request.request_id].order, sequence.index

    def _entry(self, sequence: Sequence, snapshot: Snapshot) -> Entry:
        return Entry(*self._age(sequence), sequence, snapshot)

    def _enqueue(self, sequence: Sequence, snapshot: Snapshot) -> None:
        self._queue.push(self._entry(sequence, snapshot))

    def _has_room(self) -> bool:
        """There is a slot and a row for one more."""
        return self.slots.num_free > 0 and self.num_running < self.limits.max_num_seqs

    def _can_admit(self) -> bool:
        """Somebody waits, and there is room, with pages for a first piece; others keep some to grow into."""
        if self._queue.num_waiting == 0 or not self._has_room():
            return False
        entry = self._queue.head()
        assert entry is not None, "num_waiting counts live entries"
        return not self.paging.is_used or self._has_pages(entry)

    def _has_pages(self, entry: Entry) -> bool:
        sequence = entry.sequence
        piece = min(self.limits.max_num_batched_tokens, sequence.num_prompt) if entry.snapshot is None else 1
        need = self.paging.allocator.pages_for(sequence.num_computed + piece)
        return self.paging.can_have(need, self.paging.reserve if self.num_running else 0)

    def _is_next(self, answer: Sequence) -> bool:
        """There is room for a further answer, and nobody in the queue is before it."""
        head = self._queue.head()
        return self._has_room() and not (head is not None and head < self._entry(answer, None))

    def _admit(self) -> Entry:
        """Give the first in the queue a slot, and pages for what its snapshot holds and one token more."""
        entry = self._queue.pop()
        sequence = entry.sequence
        begun = sequence.num_computed >= sequence.num_prompt
        self._hold(sequence, self._decoding if begun else self._prefilling)
        if entry.snapshot is not None:
            self.paging.grow(sequence, sequence.num_computed + 1)
        return entry

    def _hold(self, sequence: Sequence, running: dict[Sequence, None]) -> None:
        """Give a sequence a slot and its place among those that run."""
        sequence.slot = self.slots.allocate()
        sequence.status = Status.RUNNING
        running[sequence] = None

    # ---- the end of a sequence ----

    def _finish(self, sequence: Sequence) -> None:
        """The only way out: whatever the sequence held is given back."""
        self._on_finish(sequence)
        if sequence.status is Status.RUNNING:
            self._let_go(sequence)
        elif self._is_queued(sequence):
            self._queue.forget(sequence)
        sequence.status = Status.FINISHED
        request_id = sequence.request.request_id
        if all(s.status is Status.FINISHED for s in self._live[request_id].sequences):
            del self._live[request_id]

    def _is_queued(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is in the queue: answers 2 to n aren't until the prompt is done."""
        return sequence.index == 0 or sequence.num_computed > 0
