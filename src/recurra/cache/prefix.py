"""Which states are kept, and for which tokens: a radix tree, and the order in which states are given up.

Numbers only. A node is a position in some text; its entry, if it has one, says that the states of all
recurrent layers were copied exactly there, and which pages hold the keys and values up to there. What
an entry's handle is, the tiers know (:mod:`recurra.cache.store`).

>>> tree = PrefixTree()
>>> entry = tree.insert("model", pack([5, 6, 7, 8]), 3)
>>> tree.lookup("model", pack([5, 6, 7, 9]), limit=3).entry is entry
True
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: Bytes of a packed token.
_WIDTH = 4

#: Why a text that was known has no state any more.
Loss = Literal["evicted", "pages_gone"]


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: what the tree compares, at the speed of memory."""
    return array("i", tokens).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The token ids again."""
    return array("i", packed).tolist()


@dataclass(slots=True, eq=False)
class Node:
    """A position in a text: the edge from its parent, and what is kept there."""

    parent: Node | None
    edge: bytes
    depth: int  # tokens from the root
    children: dict[bytes, Node] = field(default_factory=dict)
    entry: Entry | None = None
    lost: Loss | None = None  # an entry was here


@dataclass(slots=True, eq=False)
class Entry:
    """A kept state.

    Attributes:
        node: its place; ``position`` is the number of tokens that the state has seen.
        space: whose text it is: model, adapter, salt.
        pages: of keys and values up to there, each held once for this entry.
        handle: where its bytes are; the tiers' own.
        hits: how often it was resumed from.
        nbytes: what it takes, for the weighing.
        pins: readers under way; a pinned entry stays.
    """

    node: Node
    space: Hashable
    pages: tuple[int, ...] = ()
    handle: Any = None
    hits: int = 0
    nbytes: int = 1
    pins: int = 0

    @property
    def position(self) -> int:
        return self.node.depth

    @property
    def saved(self) -> int:
        """Tokens to compute again without it: those after the nearest kept state before it."""
        node = self.node.parent
        while node is not None and node.entry is None:
            node = node.parent
        return self.position - (0 if node is None else node.depth)

    @property
    def live(self) -> bool:
        """Whether it is still in the tree."""
        return self.node.entry is self

    def packed(self) -> bytes:
        """Its tokens."""
        parts = []
        node: Node | None = self.node
        while node is not None:
            parts.append(node.edge)
            node = node.parent
        return b"".join(reversed(parts))


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a text.

    Attributes:
        entry: the deepest kept state at or before the limit.
        common: tokens that the text shares with some text in the tree.
        lost: why a deeper state than ``entry`` is missing, if there was one.
    """

    entry: Entry | None
    common: int
    lost: Loss | None


class PrefixTree:
    """Kept states by the tokens that led to them. A space's texts are invisible to all others.

    Args:
        max_lost: places of given-up states that are remembered, so that a miss can say why and the
            place where two texts part is still seen.
    """

    def __init__(self, max_lost: int = 4096) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._lost: OrderedDict[tuple[Hashable, int], Node] = OrderedDict()
        self._max_lost = max_lost
        self.num_entries = 0

    def __iter__(self) -> Iterator[Entry]:
        for root in self._roots.values():
            yield from (node.entry for node in _below(root) if node.entry is not None)

    def lookup(self, space: Hashable, packed: bytes, limit: int) -> Match:
        """The deepest state for a text that has seen at most ``limit`` of its tokens."""
        node = self._roots.get(space)
        at, best, lost = 0, None, None
        while node is not None:
            child = node.children.get(packed[at * _WIDTH : (at + 1) * _WIDTH])
            if child is None:
                break
            shared = _common(child.edge, packed, at)
            at += shared
            if at < child.depth:
                break
            node = child
            if node.depth <= limit:
                best, lost = (node.entry, None) if node.entry else (best, node.lost or lost)
        return Match(best, at, lost)

    def held_elsewhere(self, space: Hashable, packed: bytes, limit: int, spaces: int = 32) -> bool:
        """Whether one of the other spaces (the first few are asked) has a state for this text."""
        others = (name for name in list(self._roots)[:spaces] if name != space)
        return any(self.lookup(name, packed, limit).entry is not None for name in others)

    def insert(self, space: Hashable, packed: bytes, position: int) -> Entry:
        """The entry after the first ``position`` tokens of a text: a new one, or the one that is there."""
        assert 0 < position <= len(packed) // _WIDTH, (position, len(packed))
        node = self._reach(space, packed[: position * _WIDTH])
        if node.entry is None:
            node.entry = Entry(node, space)
            self._forget_loss(space, node)
            self.num_entries += 1
        return node.entry

    def remove(self, entry: Entry, why: Loss | None = "evicted") -> None:
        """Take an entry out; its place is remembered for a while, unless ``why`` is None."""
        assert entry.live, "this entry is not in the tree"
        assert entry.pins == 0, "somebody reads this entry"
        node = entry.node
        node.entry = None
        self.num_entries -= 1
        if why is not None:
            node.lost = why
            self._lost[entry.space, id(node)] = node
        else:
            self._prune(entry.space, node)
        while len(self._lost) > self._max_lost:
            (space, _), old = self._lost.popitem(last=False)
            old.lost = None
            self._prune(space, old)

    def below(self, entry: Entry) -> list[Entry]:
        """The nearest entries that continue this one's text: what saves less because of it."""
        found, work = [], list(entry.node.children.values())
        while work:
            node = work.pop()
            if node.entry is not None:
                found.append(node.entry)
            else:
                work.extend(node.children.values())
        return found

    def check(self) -> None:
        """Assert the invariants of the whole tree."""
        count, lost = 0, 0
        for space, root in self._roots.items():
            assert (root.parent, root.depth, root.edge, root.entry) == (None, 0, b"", None)
            assert root.children, f"an empty space stays: {space!r}"
            for node in _below(root):
                if node is not root:
                    self._check_node(node)
                    count += node.entry is not None
                    lost += node.lost is not None
                    assert node.entry is None or node.entry.space == space
        assert count == self.num_entries, (count, self.num_entries)
        assert lost == len(self._lost) <= self._max_lost, (lost, len(self._lost))

    def _check_node(self, node: Node) -> None:
        assert node.parent is not None
        assert node.edge
        assert len(node.edge) % _WIDTH == 0
        assert node.depth == node.parent.depth + len(node.edge) // _WIDTH
        assert node.parent.children[node.edge[:_WIDTH]] is node
        assert node.entry is None or (node.entry.node is node and node.lost is None)
        assert node.entry or node.lost or len(node.children) > 1, "a node that means nothing stays"

    def _reach(self, space: Hashable, packed: bytes) -> Node:
        """The node at the end of these tokens; edges are split and added as needed."""
        node = self._roots.setdefault(space, Node(None, b"", 0))
        at, total = 0, len(packed) // _WIDTH
        while at < total:
            first = packed[at * _WIDTH : (at + 1) * _WIDTH]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = Node(node, packed[at * _WIDTH :], total)
            elif (shared := _common(child.edge, packed, at)) * _WIDTH < len(child.edge):
                child = _split(child, shared)
            node, at = child, child.depth
        return node

    def _forget_loss(self, space: Hashable, node: Node) -> None:
        if node.lost is not None:
            node.lost = None
            del self._lost[space, id(node)]

    def _prune(self, space: Hashable, node: Node) -> None:
        """Take out what means nothing any more, from a node up."""
        while node.entry is None and node.lost is None and node.parent is not None:
            parent = node.parent
            if len(node.children) > 1:
                return
            if node.children:
                _join(node)
                return
            del parent.children[node.edge[:_WIDTH]]
            node = parent
        if node.parent is None and not node.children:
            self._roots.pop(space, None)


def _below(root: Node) -> Iterator[Node]:
    work = [root]
    while work:
        node = work.pop()
        yield node
        work.extend(node.children.values())


def _common(edge: bytes, packed: bytes, at: int) -> int:
    """Tokens at the start of an edge that a text also has from token ``at`` on."""
    start = at * _WIDTH
    low, high = 0, min(len(edge), len(packed) - start) // _WIDTH
    if edge[: high * _WIDTH] == packed[start : start + high * _WIDTH]:
        return high
    while high - low > 1:  # the first ``low`` agree, the first ``high`` don't
        middle = (low + high) // 2
        cut = slice(low * _WIDTH, middle * _WIDTH)
        if edge[cut] == packed[start + cut.start : start + cut.stop]:
            low = middle
        else:
            high = middle
    return low


def _split(node: Node, tokens: int) -> Node:
    """Cut an edge after some tokens; returns the node that is new there."""
    parent, cut = node.parent, tokens * _WIDTH
    assert parent is not None
    middle = Node(parent, node.edge[:cut], parent.depth + tokens)
    parent.children[node.edge[:_WIDTH]] = middle
    node.parent, node.edge = middle, node.edge[cut:]
    middle.children[node.edge[:_WIDTH]] = node
    return middle


def _join(node: Node) -> None:
    """Give a node's edge to its only child, which takes its place."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge = node.edge + child.edge
    child.parent = node.parent
    node.parent.children[node.edge[:_WIDTH]] = child


class Ranking:
    """The order in which a tier gives entries up: tokens saved per byte, how often, and how long ago.

    The worth of an entry is ``(1 + hits) * saved / nbytes``, counted from the level at which it was last
    used; each entry that is given up raises the level to its own (greedy-dual, weighted by frequency).
    So a long prefix outlives many short ones, and what nobody uses goes in the end.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._base: dict[Entry, float] = {}
        self._rank: dict[Entry, float] = {}
        self._heap: list[tuple[float, int, Entry]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._rank

    def use(self, entry: Entry) -> None:
        """Enter an entry, or note that it was used."""
        self._base[entry] = self._level
        self._weigh(entry)

    def weigh(self, entries: Iterable[Entry]) -> None:
        """Rank entries anew whose saving changed; those that aren't in this tier are left out."""
        for entry in entries:
            if entry in self._rank:
                self._weigh(entry)

    def discard(self, entry: Entry) -> None:
        """Leave an entry out from now on."""
        self._rank.pop(entry, None)
        self._base.pop(entry, None)

    def worst(self) -> Entry | None:
        """The entry to give up next; it stays until :meth:`discard`. None: all are pinned, or there is none."""
        pinned, found = [], None
        while self._heap and found is None:
            item = self._heap[0]
            rank, _, entry = item
            if self._rank.get(entry) != rank:
                heapq.heappop(self._heap)
            elif entry.pins:
                pinned.append(heapq.heappop(self._heap))
            else:
                found = entry
                self._level = max(self._level, rank)
        for item in pinned:
            heapq.heappush(self._heap, item)
        return found

    def _weigh(self, entry: Entry) -> None:
        rank = self._base[entry] + (1 + entry.hits) * entry.saved / entry.nbytes
        self._rank[entry] = rank
        self._pushed += 1
        heapq.heappush(self._heap, (rank, self._pushed, entry))
        if len(self._heap) > 4 * len(self._rank) + 64:
            self._heap = [(r, n, e) for n, (e, r) in enumerate(self._rank.items())]
            self._pushed = len(self._heap)
            heapq.heapify(self._heap)
