"""Consoles: text goes to stdout, everything said about it to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

#: Told how far a stage is: its name, what is done, and the total.
Report = Callable[[str, int, int], None]


def stderr() -> Console:
    """A console on the present stderr (tests and shells replace it)."""
    return Console(stderr=True)


def stdout() -> Console:
    """A console on the present stdout."""
    return Console()


def write(text: str) -> None:
    """Put text on stdout now, exactly as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str, quiet: bool = False) -> None:
    """A remark on stderr."""
    if not quiet:
        stderr().print(text, style="dim", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress(quiet: bool) -> Iterator[Report]:
    """Bars on stderr, one a stage; nothing where stderr is no terminal or ``quiet`` is set.

    A stage named ``warm-up: sampling`` is part of ``warm-up``.
    """
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())  # fmt: skip
    bars = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        name = stage.partition(":")[0]
        if name not in tasks:
            tasks[name] = bars.add_task(stage, total=total or None)
        bars.update(tasks[name], description=stage, completed=done, total=total or None)

    with bars:
        yield report
