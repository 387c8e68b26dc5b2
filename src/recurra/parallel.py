"""The one place that knows how many ranks there are; today one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the ranks that hold one model."""

    rank: int = 0
    size: int = 1
