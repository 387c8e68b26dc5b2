"""``recurra bench kernels``: the operators on this machine, beside its ceilings."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path

from recurra import __version__
from recurra.cli.console import note, write
from recurra.cli.failure import OK
from recurra.cli.flags import Quiet


def kernels(*, device: str = "auto", output: Path | None = None, quiet: Quiet = False) -> int:
    """Check the operators against float64, then time them: every backend, the reference, peers.

    Args:
        device: "auto", "cpu" or "cuda".
        output: Write the figures there (JSON), and a roofline plot beside them (PNG).
        quiet: No progress.
    """
    import torch

    from recurra.bench.kernels import as_record, measure, plot, table
    from recurra.device import detect

    found = detect(device)
    note(f"[{found.type}: each operator is checked, then timed]", quiet)
    ceilings, rows = measure(found)
    write(table(ceilings, rows) + "\n")
    if output is not None:
        record = {
            "date": datetime.date.today().isoformat(), "version": __version__, "torch": torch.__version__,
            "python": platform.python_version(), "threads": torch.get_num_threads(),
            "machine": torch.cuda.get_device_name() if found.type == "cuda" else platform.machine(),
            **as_record(ceilings, rows),
        }  # fmt: skip
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        plot(output.with_suffix(".png"), ceilings, rows)
    return OK
