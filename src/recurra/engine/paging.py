"""Pages of keys and values of the sequences that run: how many, who shares them, what giving way costs. No torch.

A sequence holds pages while it holds a slot, and only then: a waiting one has their content in its snapshot, or
is computed anew. So pages that run out come back by sequences that end or are preempted, never by waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recurra.cache.alloc import PageAllocator
from recurra.errors import RequestError
from recurra.types import Request, Sequence

#: Share of the pages that admission leaves free, so that those that run can grow for a while.
_RESERVE = 0.01


def _nothing_to_reclaim(count: int) -> None:
    """Nobody but sequences holds pages."""


@dataclass(frozen=True, slots=True)
class MoveCost:
    """What saving a sequence and bringing it back costs, against computing it again.

    Attributes:
        slot_bytes, page_bytes: of a slot and of a page.
        token_bytes: what can be copied out and back in the time that a prompt's token takes.
    """

    slot_bytes: int = 0
    page_bytes: int = 0
    token_bytes: int = 1

    def is_above_computing(self, sequence: Sequence) -> bool:
        """Whether the tokens computed so far are cheaper to compute again than to move."""
        moved = self.slot_bytes + len(sequence.pages) * self.page_bytes
        return moved > sequence.num_computed * self.token_bytes


#: Multiply-adds a second, and bytes a second to the host and back, roughly: enough to compare the two.
_RATES = {"cpu": (5e10, 2e9), "cuda": (2e14, 1e10)}


def move_cost(slot_bytes: int, page_bytes: int, num_parameters: int, device_type: str) -> MoveCost:
    """The cost of moving on a kind of device: computing a prompt's token takes a multiply-add a parameter."""
    multiply_adds, copied = _RATES[device_type]
    return MoveCost(slot_bytes, page_bytes, max(1, int(num_parameters / multiply_adds * copied)))


@dataclass(slots=True)
class Paging:
    """Pages by sequence. In a model without attention nothing here does anything.

    Attributes:
        allocator: who holds which.
        cost: of preemption.
        reclaim: asked for so many pages that caches could give up, before anybody waits or is preempted.
    """

    allocator: PageAllocator
    cost: MoveCost = MoveCost()
    reclaim: Callable[[int], None] = _nothing_to_reclaim

    @classmethod
    def none(cls) -> Paging:
        """Of a model without attention."""
        return cls(PageAllocator(0, 0))

    @property
    def is_used(self) -> bool:
        """Whether the model has pages at all."""
        return self.allocator.page_size > 0

    @property
    def reserve(self) -> int:
        """Pages that admission leaves free while others run."""
        return max(1, int(self.allocator.num_pages * _RESERVE)) if self.is_used else 0

    def holds(self, sequence: Sequence, tokens: int) -> bool:
        """Whether a sequence has the pages of its first ``tokens`` tokens."""
        return len(sequence.pages) >= self.allocator.pages_for(tokens)

    def can_have(self, count: int, spare: int = 0) -> bool:
        """Whether ``count`` pages are free and ``spare`` more; caches are asked to give way."""
        if count == 0:
            return True
        short = count + spare - self.allocator.num_free
        if short > 0:
            self.reclaim(short)
        return self.allocator.num_free >= count + spare

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the pages of its first ``tokens`` tokens, all or none; False: they can't be had."""
        missing = self.allocator.pages_for(tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if not self.can_have(missing):
            return False
        sequence.pages += self.allocator.allocate(missing)
        return True

    def within_reach(self, sequence: Sequence) -> int:
        """Tokens that fit into a sequence's pages and into those that are free."""
        return (len(sequence.pages) + self.allocator.num_free) * self.allocator.page_size

    def can_fork(self, source: Sequence) -> bool:
        """Whether a fork could have its copy of the last page and grow."""
        return not self.is_used or self.can_have(1, self.reserve)

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Share full pages; of the last one, which both will write at their next token, take one for a copy."""
        if not self.is_used:
            return
        whole, rest = divmod(source.num_computed, self.allocator.page_size)
        full = source.pages[:whole]
        self.allocator.share(full)
        target.pages = full + self.allocator.allocate(1 if rest else 0)

    def release(self, sequence: Sequence) -> None:
        """Take everything from a sequence."""
        self.allocator.free(sequence.pages)
        sequence.pages = []

    def refuse_what_never_fits(self, request: Request) -> None:
        """Raise RequestError for a request that would need more pages than there are."""
        prompt, answer = len(request.prompt_token_ids), request.params.max_tokens or 0
        need, there = self.allocator.pages_for(prompt + answer), self.allocator.num_pages
        if need > there:
            size = self.allocator.page_size
            raise RequestError(
                f"the prompt has {prompt} tokens and max_tokens is {answer}: together they take {need} pages of "
                f"{size} tokens, and there are {there} in all. Ask for at most {there * size} tokens, or start "
                "the engine with a larger num_kv_pages.",
                param="max_tokens",
                code="context_length_exceeded",
            )
