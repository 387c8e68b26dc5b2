"""The tree of kept states: found where it should be, nothing found that isn't, and worth decides who goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recurra.cache.prefix import Entry, PrefixTree, Ranking, pack, unpack


def _tree(*texts: str, space: str = "model") -> tuple[PrefixTree, dict[str, Entry]]:
    tree = PrefixTree()
    return tree, {t: tree.insert(space, pack([ord(c) for c in t]), len(t)) for t in texts}


def _find(tree: PrefixTree, text: str, limit: int | None = None, space: str = "model") -> tuple[int, int]:
    match = tree.lookup(space, pack([ord(c) for c in text]), len(text) if limit is None else limit)
    return (match.entry.position if match.entry else 0), match.common


def test_tokens_survive_packing() -> None:
    assert unpack(pack([0, 1, 255, 256, 2**31 - 1])) == [0, 1, 255, 256, 2**31 - 1]


def test_the_deepest_state_within_the_limit_is_found() -> None:
    tree, _ = _tree("abc", "abcdef", "abcdxy")
    assert _find(tree, "abcdefgh") == (6, 6)
    assert _find(tree, "abcdef", limit=5) == (3, 6)
    assert _find(tree, "abcdxz") == (3, 5)
    assert _find(tree, "abx") == (0, 2)
    assert _find(tree, "zzz") == (0, 0)
    tree.check()


def test_a_space_sees_nothing_of_another() -> None:
    tree, _ = _tree("abcd")
    assert _find(tree, "abcd", space="other") == (0, 0)
    assert tree.held_elsewhere("other", pack([ord(c) for c in "abcd"]), 4)
    assert not tree.held_elsewhere("model", pack([ord(c) for c in "abcd"]), 4)


def test_inserting_twice_gives_the_same_entry_and_its_tokens() -> None:
    tree, entries = _tree("abc", "abcdef")
    assert tree.insert("model", pack([ord(c) for c in "abcdefgh"]), 6) is entries["abcdef"]
    assert unpack(entries["abcdef"].packed()) == [ord(c) for c in "abcdef"]
    assert tree.num_entries == 2


def test_a_lost_state_says_why_and_still_marks_where_texts_part() -> None:
    tree, entries = _tree("ab", "abcdef")
    tree.remove(entries["abcdef"], "pages_gone")
    match = tree.lookup("model", pack([ord(c) for c in "abcdefg"]), 7)
    assert match.entry is entries["ab"]
    assert (match.common, match.lost) == (6, "pages_gone")
    tree.insert("model", pack([ord(c) for c in "abcdef"]), 6)
    assert tree.lookup("model", pack([ord(c) for c in "abcdefg"]), 7).lost is None
    tree.check()


def test_only_so_many_losses_are_remembered() -> None:
    tree = PrefixTree(max_lost=2)
    for n in range(5):
        tree.remove(tree.insert("model", pack([n, n, n]), 3))
        tree.check()
    known = [tree.lookup("model", pack([n, n, n]), 3).common for n in range(5)]
    assert known == [0, 0, 0, 3, 3]


def test_an_entry_saves_what_comes_after_the_one_before_it() -> None:
    tree, entries = _tree("abcdef")
    assert entries["abcdef"].saved == 6
    above = tree.insert("model", pack([ord(c) for c in "abcd"]), 4)
    assert (entries["abcdef"].saved, above.saved) == (2, 4)
    assert tree.below(above) == [entries["abcdef"]]


def _short(tree: PrefixTree, n: int) -> Entry:
    return tree.insert("model", pack([1000 + n] * 50), 50)


def test_one_long_prefix_outlives_many_short_ones() -> None:
    tree, rank = PrefixTree(), Ranking()
    long = tree.insert("model", pack([7] * 5000), 5000)
    rank.use(long)
    for n in range(500):
        rank.use(_short(tree, n))
        if len(rank) > 8:
            worst = rank.worst()
            assert worst is not None
            rank.discard(worst)
            tree.remove(worst)
        if n % 60 == 59:  # somebody still asks about the long one now and then
            long.hits += 1
            rank.use(long)
    assert long in rank
    assert long.live


def test_what_nobody_uses_goes_in_the_end() -> None:
    tree, rank = PrefixTree(), Ranking()
    long = tree.insert("model", pack([7] * 500), 500)
    rank.use(long)
    for n in range(200):
        rank.use(_short(tree, n))
        if len(rank) > 4:
            worst = rank.worst()
            assert worst is not None
            rank.discard(worst)
    assert long not in rank


def test_a_pinned_entry_stays_and_bytes_weigh() -> None:
    tree, rank = PrefixTree(), Ranking()
    small, big = _short(tree, 1), _short(tree, 2)
    big.nbytes = 10
    for entry in (small, big):
        rank.use(entry)
    assert rank.worst() is big
    big.pins = 1
    assert rank.worst() is small
    small.pins = 1
    assert rank.worst() is None
    big.pins = 0
    assert rank.worst() is big


def test_a_state_put_before_another_lowers_its_worth() -> None:
    tree, rank = PrefixTree(), Ranking()
    deep, other = tree.insert("model", pack([1] * 100), 100), tree.insert("model", pack([2] * 60), 60)
    rank.use(deep)
    rank.use(other)
    assert rank.worst() is other
    above = tree.insert("model", pack([1] * 90), 90)
    rank.weigh(tree.below(above))
    assert rank.worst() is deep


_TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
_SPACE = st.sampled_from(["a", "b"])


class TreeMachine(RuleBasedStateMachine):
    """The tree against a table of prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(max_lost=5)
        self.rank = Ranking()
        self.kept: dict[tuple[str, tuple[int, ...]], Entry] = {}
        self.pinned: list[Entry] = []

    @rule(space=_SPACE, text=_TEXT, data=st.data())
    def insert(self, space: str, text: list[int], data: Any) -> None:
        position = data.draw(st.integers(1, len(text)))
        entry = self.tree.insert(space, pack(text), position)
        known = self.kept.setdefault((space, tuple(text[:position])), entry)
        assert known is entry
        self.rank.use(entry)
        self.rank.weigh(self.tree.below(entry))

    @rule(space=_SPACE, text=_TEXT, data=st.data())
    def lookup(self, space: str, text: list[int], data: Any) -> None:
        limit = data.draw(st.integers(0, len(text)))
        match = self.tree.lookup(space, pack(text), limit)
        fits = [n for n in range(1, limit + 1) if (space, tuple(text[:n])) in self.kept]
        assert (match.entry.position if match.entry else 0) == max(fits, default=0)
        if match.entry is not None:
            assert match.entry is self.kept[space, tuple(text[: match.entry.position])]
            match.entry.hits += 1
            self.rank.use(match.entry)
        shared = max((_shared(key, text) for name, key in self.kept if name == space), default=0)
        assert match.common >= shared

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), why=st.sampled_from(["evicted", "pages_gone", None]))
    def remove(self, data: Any, why: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        entry = self.kept[key]
        if entry.pins:
            return
        self.rank.discard(entry)
        self.tree.remove(entry, why)
        del self.kept[key]
        assert not entry.live

    @rule()
    def give_up(self) -> None:
        worst = self.rank.worst()
        free = [entry for entry in self.kept.values() if not entry.pins]
        assert (worst is None) == (not free)
        if worst is not None:
            assert worst.pins == 0
            self.rank.discard(worst)
            key = next(key for key, entry in self.kept.items() if entry is worst)
            self.tree.remove(self.kept.pop(key))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        entry = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        entry.pins += 1
        self.pinned.append(entry)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pinned.pop().pins -= 1

    @invariant()
    def whole(self) -> None:
        self.tree.check()
        assert set(self.tree) == set(self.kept.values())
        for (_, text), entry in self.kept.items():
            assert unpack(entry.packed()) == list(text)
        assert len(self.rank) == len(self.kept)


def _shared(key: tuple[int, ...], text: list[int]) -> int:
    pairs = zip(key, text, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(key), len(text)))


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_ten_thousand_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        TreeMachine,
        settings=settings(
            max_examples=20, stateful_step_count=500, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
