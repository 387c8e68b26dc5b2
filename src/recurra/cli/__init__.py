"""The command ``recurra``. Commands are imported when they run: ``--help`` needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, 1 (it failed), 2 (wrong usage) or 130 (interrupted).

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    from recurra.cli.app import run

    return run(list(sys.argv[1:] if argv is None else argv))
