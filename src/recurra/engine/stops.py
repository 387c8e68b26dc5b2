"""Stop strings: found wherever token boundaries fall, and never shown before they are sure."""

from __future__ import annotations

from typing import NamedTuple


class Match(NamedTuple):
    """A stop string in a text: text[start:end] == stop."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: tuple[str, ...], after: int) -> Match | None:
    """The stop string that is complete first, among those that end beyond ``after`` characters.

    That is what a reader sees who gets the text letter by letter, so how tokens cut it doesn't matter.
    Of two that end together the longer counts.
    """
    best: Match | None = None
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            found = Match(start, start + len(stop), stop)
            if best is None or (found.end, found.start) < (best.end, best.start):
                best = found
    return best


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of ``text`` that may still become a stop string."""
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(stop[0], at + 1)
    return longest
