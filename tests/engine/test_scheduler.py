"""The scheduler's policy and its bookkeeping, with a model made of nothing: no tensor anywhere."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recurra.cache.alloc import SlotAllocator
from recurra.config.scheduler import SchedulerLimits
from recurra.engine.scheduler import Plan, Scheduler
from recurra.errors import QueueFullError, RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import SCRATCH_SLOT, Request, Sequence, Status


class World:
    """A scheduler, and a runner that only counts: each answer ends after ``max_tokens`` tokens."""

    def __init__(self, slots: int = 4, seqs: int = 4, tokens: int = 16, queue: int | None = None) -> None:
        self.slots = SlotAllocator(slots)
        self.ended: list[Sequence] = []
        self.scheduler = Scheduler(SchedulerLimits(seqs, tokens, queue), self.slots, self._on_finish)
        self.forked: list[int] = []
        self.saves = 0

    def _on_finish(self, sequence: Sequence) -> None:
        assert sequence.status is not Status.FINISHED, "ends once"
        self.ended.append(sequence)

    def add(self, name: str, prompt: int = 3, answer: int = 2, n: int = 1, priority: int = 0) -> None:
        params = SamplingParams(n=n, max_tokens=answer)
        self.scheduler.add(Request(name, tuple(range(1, prompt + 1)), params, priority=priority))

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self)
        self.check(plan)
        self.commit(plan)
        return plan

    def check(self, plan: Plan) -> None:
        limits = self.scheduler.limits
        rows = [*plan.decode, *(c.sequence for c in plan.prefill)]
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len({s.slot for s in rows}) == len(rows) <= limits.max_num_seqs
        assert all(s.slot != SCRATCH_SLOT for s in rows)
        for sequence, snapshot in plan.restores:
            assert sequence in plan.decode
            assert snapshot == f"state of {sequence.request.request_id}"
            assert sequence.num_computed == sequence.num_prompt == len(sequence.token_ids) - 1
        for chunk in plan.prefill:
            assert chunk.start == chunk.sequence.num_computed
            assert chunk.length > 0

    def commit(self, plan: Plan) -> None:
        new = list(plan.decode)
        for chunk in plan.prefill:
            if chunk.is_last:
                new.extend(chunk.answers)
        ended = [s for s in new if len(s.output_ids) + 1 == s.request.params.max_tokens]
        self.scheduler.commit(plan, dict.fromkeys(new, 7), ended, self)

    def fork(self, source: Sequence, target: Sequence) -> None:
        assert source.request is target.request
        assert source.status is target.status is Status.RUNNING, "its state is there"
        assert target.num_computed == target.num_prompt == len(target.token_ids) - 1
        self.forked.append(target.index)

    def save(self, sequence: Sequence) -> str:
        assert sequence.status is Status.RUNNING, "its state is there"
        self.saves += 1
        return f"state of {sequence.request.request_id}"

    def clear(self, sequence: Sequence) -> None:
        assert sequence.status is Status.RUNNING, "its state is there"

    def run_dry(self, most: int = 10_000) -> int:
        steps = 0
        while self.scheduler.has_unfinished():
            assert self.step(), "something is left, so something must run"
            steps += 1
            assert steps < most
        assert self.slots.num_used == self.scheduler.num_running == self.scheduler.num_waiting == 0
        return steps


def names(plan: Plan) -> list[str]:
    return [c.sequence.request.request_id for c in plan.prefill]


def test_importing_the_scheduler_needs_no_torch() -> None:
    code = "import sys, recurra.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_more_requests_than_slots_wait_and_none_fails() -> None:
    for slots in (1, 2, 3):
        world = World(slots=slots, seqs=3)
        for i in range(9):
            world.add(str(i))
        world.run_dry()
        assert [s.request.request_id for s in world.ended] == [str(i) for i in range(9)]
        assert all(len(s.output_ids) == 2 for s in world.ended)


def test_prompts_share_a_step_with_decoding_rows_and_are_cut_at_the_budget() -> None:
    world = World(tokens=8)
    world.add("a", prompt=2, answer=9)
    world.step()
    world.add("b", prompt=12)
    plan = world.step()
    assert [s.request.request_id for s in plan.decode] == ["a"]
    assert [(c.start, c.length) for c in plan.prefill] == [(0, 7)]
    plan = world.step()
    assert [(c.start, c.length, c.is_last) for c in plan.prefill] == [(7, 5, True)]


def test_lower_priority_numbers_go_first_and_ties_by_arrival() -> None:
    world = World(slots=1)
    for name, priority in (("c", 1), ("d", 1), ("a", 0), ("b", 0), ("z", 2)):
        world.add(name, priority=priority)
    world.run_dry()
    assert [s.request.request_id for s in world.ended] == ["a", "b", "c", "d", "z"]


def test_decoding_rows_take_turns_where_the_budget_is_smaller() -> None:
    world = World(slots=5, seqs=5, tokens=2)
    for i in range(5):
        world.add(str(i), prompt=1, answer=40)
    counts = dict.fromkeys(map(str, range(5)), 0)
    while world.scheduler.num_waiting or any(s.num_computed < 1 for s in world.scheduler._prefilling):
        world.step()
    for _ in range(20):
        for sequence in world.step().decode:
            counts[sequence.request.request_id] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    world.run_dry()


def test_decoding_rows_that_fill_the_budget_do_not_starve_a_prompt() -> None:
    world = World(slots=5, seqs=5, tokens=4)
    for i in range(4):
        world.add(str(i), prompt=1, answer=1000)
    while world.scheduler.num_waiting:
        world.step()
    world.add("late", prompt=10, answer=1)
    for _ in range(12):
        world.step()
    assert [s.request.request_id for s in world.ended] == ["late"]


@pytest.mark.parametrize("tokens", [1, 2, 3, 16])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_answer_of_a_request_runs_even_with_fewer_slots(tokens: int, slots: int) -> None:
    world = World(slots, slots, tokens)
    world.add("many", prompt=5, answer=3, n=7)
    world.add("after", prompt=2)
    world.run_dry()
    done = [s.index for s in world.ended if s.request.request_id == "many"]
    assert sorted(done) == list(range(7))
    assert all(len(s.output_ids) == s.request.params.max_tokens for s in world.ended)


def test_answers_of_a_started_request_come_before_later_requests() -> None:
    world = World(slots=2, seqs=2)
    world.add("first", prompt=16, answer=3, n=3)  # fills the first step
    world.add("second", answer=3)
    world.run_dry()
    assert world.ended[-1].request.request_id == "second"


def test_answers_that_find_slots_are_forked_and_only_the_others_need_a_snapshot() -> None:
    world = World(slots=4, seqs=4)
    world.add("many", prompt=5, answer=3, n=6)
    world.step()
    assert (world.forked, world.saves) == ([1, 2, 3], 1)
    assert [s.index for s in world.step().decode] == [0, 1, 2, 3]
    assert [s.index for s, _ in world.step().restores] == []
    assert [s.index for s, _ in world.step().restores] == [4, 5]
    world.run_dry()
    assert (world.forked, world.saves) == ([1, 2, 3], 1)


def test_a_fork_takes_no_slot_from_a_request_that_is_before_it() -> None:
    world = World(slots=2, seqs=2)
    world.add("many", prompt=32, answer=3, n=3, priority=1)  # fills two steps
    world.step()
    world.add("urgent", answer=3, priority=0)
    world.step()
    assert world.forked == [], "the queue's head is before it"
    assert names(world.scheduler.schedule(world)) == ["urgent"]


def test_an_answer_that_outlives_the_first_one_keeps_its_state() -> None:
    world = World(slots=3, seqs=3)
    world.add("many", answer=3, n=2)
    plan = world.scheduler.schedule(world)
    (chunk,) = plan.prefill
    world.scheduler.commit(plan, dict.fromkeys(chunk.answers, 7), [chunk.sequence], world)
    assert world.forked == [1], "forked while the first one had its slot: fork() looks"
    world.run_dry()


def test_a_prompt_is_computed_once_whatever_n() -> None:
    world = World(slots=3, seqs=3)
    world.add("many", prompt=5, answer=3, n=6)
    computed = 0
    while world.scheduler.has_unfinished():
        computed += sum(c.length for c in world.step().prefill)
    assert computed == 5


def test_answers_that_end_with_their_first_token_need_no_slot() -> None:
    world = World(slots=1, seqs=1)
    world.add("many", answer=1, n=6)
    assert world.run_dry() == 1


def test_the_queue_has_a_limit_and_ids_are_unique() -> None:
    world = World(slots=1, seqs=1, queue=2)
    world.add("a")
    world.add("b")
    with pytest.raises(QueueFullError, match="2 requests") as caught:
        world.add("c")
    assert caught.value.status == 429
    assert caught.value.retry_after >= 1
    world.step()  # "a" runs, one place is free again
    with pytest.raises(RequestError, match="in use") as in_use:
        world.add("a")
    assert in_use.value.param == "request_id"
    world.add("c")
    world.run_dry()
    world.add("a")  # a finished request's id is free again
    world.run_dry()


@pytest.mark.parametrize("when", ["waiting", "mid-prefill", "decoding", "answers queued", "planned"])
def test_abort_gives_everything_back_whenever_it_comes(when: str) -> None:
    world = World(slots=2, seqs=2, tokens=4)
    if when == "waiting":
        world.add("x", prompt=8, answer=50)
        world.add("y", prompt=8, answer=50)
    world.add("a", prompt=9, answer=9, n=4)
    steps = {"waiting": 1, "mid-prefill": 1, "decoding": 4, "answers queued": 3, "planned": 1}[when]
    for _ in range(steps):
        world.step()
    plan = world.scheduler.schedule(world) if when == "planned" else None
    before = len(world.ended)
    assert world.scheduler.abort("a")
    assert not world.scheduler.abort("a"), "an id is live or it is not"
    assert len(world.ended) - before == 4, "one end for each answer"
    if plan is not None:
        world.commit(plan)
        assert all(not s.output_ids for s in world.ended[before:]), "the stale token is dropped"
    for name in ("x", "y"):
        world.scheduler.abort(name)
    assert (world.slots.num_used, world.scheduler.num_waiting, world.scheduler.num_waiting_new) == (0, 0, 0)
    world.add("next")
    world.run_dry()


def test_a_request_that_never_gets_room_a_hundred_times_leaks_nothing() -> None:
    world = World(slots=1, seqs=1)
    world.add("holder", answer=1000)
    world.step()
    for i in range(100):
        world.add(f"w{i}")
        world.step()
        world.scheduler.abort(f"w{i}")
    assert world.scheduler.num_waiting == 0
    assert len(world.scheduler._queue) < 80, "entries of aborted requests are dropped in time"


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of add, step, abort and abort between plan and commit keeps every invariant."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)
        self.world = World(slots=3, seqs=3, tokens=5, queue=6)
        self.count = 0
        self.names: list[str] = []

    @rule(
        prompt=st.integers(1, 12), answer=st.integers(1, 5), n=st.integers(1, 5), priority=st.integers(0, 2)
    )
    def add(self, prompt: int, answer: int, n: int, priority: int) -> None:
        name = str(self.count)
        try:
            self.world.add(name, prompt, answer, n, priority)
        except QueueFullError:
            assert self.world.scheduler.num_waiting_new == 6
            return
        self.count += 1
        self.names.append(name)

    @rule()
    def step(self) -> None:
        busy = self.world.scheduler.has_unfinished()
        assert bool(self.world.step()) == busy

    @precondition(lambda self: self.names)
    @rule(pick=st.integers(0, 1000), planned=st.booleans())
    def abort(self, pick: int, planned: bool) -> None:
        name = self.names[pick % len(self.names)]
        plan = self.world.scheduler.schedule(self.world) if planned else None
        self.world.scheduler.abort(name)
        if plan is not None:
            self.world.commit(plan)

    @invariant()
    def consistent(self) -> None:
        scheduler, slots = self.world.scheduler, self.world.slots
        slots.check()
        held = [*scheduler._prefilling, *scheduler._decoding]
        assert len({s.slot for s in held}) == len(held) == slots.num_used
        live = [e for e in scheduler._queue if e.sequence.status is not Status.FINISHED]
        assert len(live) == scheduler.num_waiting
        assert sum(e.snapshot is None for e in live) == scheduler.num_waiting_new
        for sequence in held:
            sequence.check()

    def teardown(self) -> None:
        self.world.run_dry()
        assert len(self.world.ended) == len(set(self.world.ended))


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
