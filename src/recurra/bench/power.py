"""Watts that the GPU draws, where nvidia-smi tells."""

from __future__ import annotations

import shutil
import subprocess
from types import TracebackType


class PowerMeter:
    """Reads the power of a GPU every 100 ms while it is entered.

    Args:
        index: GPU number; None on a CPU, where nothing is read.
    """

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._process: subprocess.Popen[str] | None = None
        self.watts: float | None = None

    def __enter__(self) -> PowerMeter:
        program = shutil.which("nvidia-smi")
        if self._index is not None and program is not None:
            self._process = subprocess.Popen(
                [program, f"--id={self._index}", "--query-gpu=power.draw", "--format=csv,noheader,nounits",
                 "--loop-ms=100"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _ = self._process.communicate()
        found = [float(line) for line in text.split() if line.replace(".", "", 1).isdigit()]
        self.watts = round(sum(found) / len(found), 1) if found else None
