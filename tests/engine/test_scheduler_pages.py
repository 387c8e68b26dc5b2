"""The scheduler's policy for pages, with a model made of nothing: who gets them, shares them and gives way."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recurra.cache.alloc import PageAllocator, SlotAllocator
from recurra.config.scheduler import SchedulerLimits
from recurra.engine.paging import MoveCost, Paging, move_cost
from recurra.engine.scheduler import Plan, Scheduler
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import Request, Sequence, Status

PAGE = 4
ALWAYS_SAVE, ALWAYS_ANEW = MoveCost(0, 0, 1), MoveCost(1 << 40, 0, 1)


class PagedWorld:
    """A scheduler with pages, and a runner that writes tokens into them as a model would.

    ``content`` is what each page holds: of each row the sequence's token there. A step checks that every token
    before its own is where the sequence's pages say, so a page that is lost, shared while it is written, or given
    to two shows at once.
    """

    def __init__(
        self, pages: int, slots: int = 4, tokens: int = 16, cost: MoveCost = ALWAYS_SAVE, size: int = PAGE
    ) -> None:
        self.slots, self.pages = SlotAllocator(slots), PageAllocator(pages, size)
        self.paging = Paging(self.pages, cost)
        limits = SchedulerLimits(slots, tokens, None)
        self.scheduler = Scheduler(limits, self.slots, self.ended_with, paging=self.paging)
        self.content: dict[int, list[int | None]] = {}
        self.ended: list[Sequence] = []
        self.saved = self.forks = 0

    def ended_with(self, sequence: Sequence) -> None:
        self.ended.append(sequence)

    def add(self, name: str, prompt: int = 3, answer: int = 2, n: int = 1, priority: int = 0) -> None:
        ids = tuple((7 * i + sum(map(ord, name))) % 97 for i in range(prompt))
        self.scheduler.add(Request(name, ids, SamplingParams(n=n, max_tokens=answer), priority=priority))

    # ---- what the runner does ----

    def save(self, sequence: Sequence) -> list[list[int | None]]:
        self.saved += 1
        used = sequence.pages[: self.pages.pages_for(sequence.num_computed)]
        return [list(self.content[page]) for page in used]

    def clear(self, sequence: Sequence) -> None:
        assert sequence.status is Status.RUNNING

    def fork(self, source: Sequence, target: Sequence) -> None:
        self.forks += 1
        for mine, other in zip(source.pages, target.pages, strict=False):
            if mine != other:
                self.content[other] = list(self.content[mine])

    def compute(self, plan: Plan) -> None:
        for sequence, saved in plan.restores:
            for page, rows in zip(sequence.pages, saved, strict=False):
                self.content[page] = list(rows)
        spans = [(s, s.num_computed, s.num_computed + 1) for s in plan.decode]
        spans += [(c.sequence, c.start, c.end) for c in plan.prefill]
        for sequence, start, end in spans:
            for at in range(start, end):
                page, row = sequence.pages[at // self.pages.page_size], at % self.pages.page_size
                self.content.setdefault(page, [None] * self.pages.page_size)[row] = sequence.token_ids[at]
        for sequence, _, end in spans:
            nothing = [None] * self.pages.page_size
            found = [token for page in sequence.pages for token in self.content.get(page, nothing)]
            assert found[:end] == sequence.token_ids[:end], sequence.request.request_id

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self)
        self.commit(plan)
        return plan

    def commit(self, plan: Plan) -> None:
        self.compute(plan)
        new = list(plan.decode)
        for chunk in plan.prefill:
            new.extend(chunk.answers if chunk.is_last else ())
        ended = [s for s in new if len(s.output_ids) + 1 == s.request.params.max_tokens]
        tokens = {s: 100 + (31 * s.token_ids[-1] + s.index) % 97 for s in new}
        self.scheduler.commit(plan, tokens, ended, self)
        free = list(self.pages._free)
        for page in free:
            self.content.pop(page, None)

    def run_dry(self, most: int = 5000) -> int:
        steps = 0
        while self.scheduler.has_unfinished():
            assert self.step(), "something is left, so something must run"
            steps += 1
            assert steps < most
        assert (self.pages.num_used, self.slots.num_used) == (0, 0)
        self.pages.check()
        return steps

    @property
    def texts(self) -> dict[tuple[str, int], list[int]]:
        return {(s.request.request_id, s.index): s.output_ids for s in self.ended}


def test_pages_grow_with_a_sequence_and_come_back() -> None:
    world = PagedWorld(pages=5)
    world.add("a", prompt=3, answer=7)
    used = []
    while world.scheduler.has_unfinished():
        world.step()
        used.append(world.pages.num_used)
    assert used == [1, 1, 2, 2, 2, 2, 0]


def test_the_youngest_gives_way_and_goes_on_with_the_same_text() -> None:
    roomy, tight = PagedWorld(pages=100), PagedWorld(pages=7)
    for world in (roomy, tight):
        for name in "abc":
            world.add(name, prompt=5, answer=12)
        world.run_dry()
    assert roomy.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 0
    assert tight.texts == roomy.texts
    assert [s.request.request_id for s in tight.ended] == ["a", "b", "c"], "the oldest never gives way"


def test_priority_decides_before_arrival() -> None:
    world = PagedWorld(pages=6)
    world.add("old", prompt=7, answer=14, priority=1)
    world.step()
    world.add("urgent", prompt=7, answer=10, priority=0)
    world.run_dry()
    assert world.scheduler.num_preemptions > 0
    assert [s.request.request_id for s in world.ended] == ["urgent", "old"]


def test_admission_waits_for_pages_of_the_first_piece_and_leaves_some() -> None:
    world = PagedWorld(pages=6, tokens=12)
    world.add("a", prompt=12, answer=3)
    world.step()
    world.add("b", prompt=12, answer=3)
    plan = world.step()
    assert not plan.prefill, "3 pages are free: those of its piece, and none to leave"
    world.run_dry()
    assert world.scheduler.num_preemptions == 0


def test_a_prompt_longer_than_the_free_pages_comes_in_shorter_pieces() -> None:
    world = PagedWorld(pages=8, tokens=8)
    world.add("a", prompt=6, answer=20)
    world.step()
    world.add("b", prompt=22, answer=2)
    world.run_dry()
    assert {name for name, _ in world.texts} == {"a", "b"}


def test_forks_share_full_pages() -> None:
    world = PagedWorld(pages=40)
    world.add("x", prompt=10, answer=2, n=4)
    world.step()
    assert world.forks == 3
    assert world.pages.num_used == 2 + 4
    world.run_dry()
    assert len({tuple(text) for text in world.texts.values()}) == 4
    aligned = PagedWorld(pages=40)
    aligned.add("x", prompt=8, answer=2, n=4)
    aligned.step()
    assert aligned.pages.num_used == 2, "no page is partly full: nothing is copied"
    aligned.run_dry()


@pytest.mark.parametrize("pages", [6, 8, 13])
def test_forks_that_run_out_of_pages(pages: int) -> None:
    roomy, tight = PagedWorld(pages=200, slots=9), PagedWorld(pages=pages, slots=9)
    for world in (roomy, tight):
        world.add("x", prompt=10, answer=9, n=6)
        world.add("y", prompt=3, answer=9, n=2)
        world.run_dry()
    assert tight.texts == roomy.texts


def test_what_is_cheap_to_compute_is_computed_anew_but_not_what_has_an_answer() -> None:
    for cost, saves in ((ALWAYS_SAVE, True), (ALWAYS_ANEW, False)):
        world = PagedWorld(pages=7, tokens=10, cost=cost)
        world.add("a", prompt=8, answer=16)
        world.step()
        world.add("late", prompt=18, answer=2)
        while world.scheduler.num_preemptions == 0:
            world.step()
        assert (world.saved > 0) == saves
        (entry,) = world.scheduler._queue
        assert (entry.snapshot is not None) == saves
        assert (entry.sequence.num_computed > 0) == saves
        world.run_dry()
    begun = PagedWorld(pages=7, cost=ALWAYS_ANEW)
    for name in "abc":
        begun.add(name, prompt=5, answer=12)
    begun.run_dry()
    assert begun.saved > 0, "its text must stay as it is, to the bit"


def test_moving_is_weighed_against_computing() -> None:
    sequence = Sequence(Request("a", (1,), SamplingParams()), 0, [1] * 500, num_computed=400, pages=[1, 2, 3])
    assert MoveCost(100, 100, 1).is_above_computing(sequence) is False
    assert MoveCost(101, 100, 1).is_above_computing(sequence)
    gpu, cpu = (move_cost(1, 1, 9_000_000_000, kind) for kind in ("cuda", "cpu"))
    assert 1 << 18 < gpu.token_bytes < 1 << 20, "a GPU computes a token of a 9B model while half a MB moves"
    assert cpu.token_bytes > 100 * gpu.token_bytes


def test_caches_give_way_before_anybody_waits() -> None:
    world = PagedWorld(pages=6)
    kept = world.pages.allocate(4)
    asked: list[int] = []

    def reclaim(count: int) -> None:
        asked.append(count)
        world.pages.free(kept[:count])
        del kept[:count]

    world.paging.reclaim = reclaim
    world.add("a", prompt=12, answer=8)
    while world.scheduler.has_unfinished():
        assert world.step()
    assert asked[0] == 1
    assert sum(asked) == 3, "as many as were short"
    world.pages.free(kept)
    assert world.scheduler.num_preemptions == 0


def test_the_step_ahead_has_its_pages_too() -> None:
    world = PagedWorld(pages=3)
    world.add("a", prompt=3, answer=9)
    world.step()
    plan = world.scheduler.schedule(world)
    ahead = world.scheduler.ahead(plan)  # position 3 is in the plan, position 4 on the second page
    assert ahead is not None
    assert len(ahead.decode[0].pages) == 2
    world.commit(plan)
    while world.scheduler.has_unfinished():
        plan = world.scheduler.schedule(world)
        world.commit(plan)
    tight = PagedWorld(pages=2)
    tight.add("a", prompt=3, answer=5)
    tight.step()
    tight.pages.allocate(1)
    assert tight.scheduler.ahead(tight.scheduler.schedule(tight)) is None


def test_what_never_fits_is_refused() -> None:
    world = PagedWorld(pages=5)
    with pytest.raises(RequestError, match=r"12 tokens and max_tokens is 9: together they take 6 pages") as e:
        world.add("x", prompt=12, answer=9)
    assert e.value.param == "max_tokens"
    world.add("x", prompt=12, answer=8)
    world.run_dry()


@pytest.mark.parametrize("seed", [37, 226, 309, 498, 1903, *range(12)])
def test_something_always_runs(seed: int) -> None:
    """Budgets of a few tokens, so that those who may take pages aren't those whose turn it is."""
    rng = random.Random(seed)
    world = PagedWorld(
        rng.randrange(6, 10), rng.randrange(2, 7), rng.randrange(1, 5), size=rng.choice([1, 2, 3])
    )
    for i in range(rng.randrange(2, 7)):
        asked = [rng.randrange(1, 6), rng.randrange(1, 6), rng.randrange(1, 3), rng.randrange(3)]
        if world.pages.pages_for(asked[0] + asked[1]) <= world.pages.num_pages:
            world.add(str(i), *asked)
        if rng.random() < 0.5 and world.scheduler.has_unfinished():
            assert world.step()
    world.run_dry()


class PagesMachine(RuleBasedStateMachine):
    """Any order of add, step, abort and abort between plan and commit keeps every page, and every text."""

    def __init__(self) -> None:
        super().__init__()
        self.world = PagedWorld(pages=7, slots=3, tokens=6, size=2)
        self.names: list[str] = []
        self.aborted: set[str] = set()
        self.asked: dict[str, tuple[int, int, int]] = {}

    @rule(prompt=st.integers(1, 8), answer=st.integers(1, 6), n=st.integers(1, 4), priority=st.integers(0, 2))
    def add(self, prompt: int, answer: int, n: int, priority: int) -> None:
        name = str(len(self.names))
        self.names.append(name)
        self.asked[name] = (prompt, answer, n)
        self.world.add(name, prompt, answer, n, priority)

    @rule(anew=st.booleans())
    def weigh(self, anew: bool) -> None:
        self.world.paging.cost = ALWAYS_ANEW if anew else ALWAYS_SAVE

    @rule()
    def step(self) -> None:
        busy = self.world.scheduler.has_unfinished()
        assert bool(self.world.step()) == busy

    @precondition(lambda self: self.names)
    @rule(pick=st.integers(0, 1000), planned=st.booleans())
    def abort(self, pick: int, planned: bool) -> None:
        name = self.names[pick % len(self.names)]
        plan = self.world.scheduler.schedule(self.world) if planned else None
        if self.world.scheduler.abort(name):
            self.aborted.add(name)
        if plan is not None:
            rows = [s for s in plan.decode if s.pages], [c for c in plan.prefill if c.sequence.pages]
            restores = tuple(r for r in plan.restores if r[0].pages)
            self.world.commit(Plan(restores, tuple(rows[0]), tuple(rows[1])))

    @invariant()
    def consistent(self) -> None:
        scheduler, pages = self.world.scheduler, self.world.pages
        pages.check()
        self.world.slots.check()
        running = [*scheduler._prefilling, *scheduler._decoding]
        held = [page for sequence in running for page in sequence.pages]
        assert {page: held.count(page) for page in held} == pages._holders
        for sequence in running:
            sequence.check()
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert len(sequence.pages) >= pages.pages_for(sequence.num_computed)
        for entry in scheduler._queue:
            assert not entry.sequence.pages

    def teardown(self) -> None:
        self.world.run_dry()
        for name, (prompt, answer, n) in self.asked.items():
            if name not in self.aborted:
                alone = PagedWorld(pages=100, slots=4)
                alone.add(name, prompt, answer, n)
                alone.run_dry()
                assert {k: v for k, v in self.world.texts.items() if k[0] == name} == alone.texts


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagesMachine = PagesMachine.TestCase
