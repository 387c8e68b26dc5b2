"""``python -m recurra`` is the command ``recurra``."""

from __future__ import annotations

import sys

from recurra.cli import main

if __name__ == "__main__":
    sys.exit(main())
