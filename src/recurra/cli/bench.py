"""``recurra bench prefix``: what kept states spare."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from recurra import __version__
from recurra.cli.console import note, write
from recurra.cli.failure import OK
from recurra.cli.flags import Model, Quiet, engine_flags, takes
from recurra.cli.running import check_model_folder, show_warnings

_SET_HERE = ("seed", "skip_tokenizer_init", "enable_prefix_caching", "prefix_cache_dir")


@takes(engine=engine_flags(_SET_HERE))
def prefix(
    model: Model,
    *,
    traces: Path | None = None,
    output: Path | None = None,
    quiet: Quiet = False,
    engine: dict[str, Any],
) -> int:
    """Replay conversations and show what kept states spare.

    Args:
        traces: Folder of traces; without it, those that the repository keeps are drawn anew.
        output: Write the figures there (JSON), and a plot beside them (PNG).
        quiet: No progress.
    """
    show_warnings(quiet)
    settings = {**engine, "model": str(check_model_folder(model)), "skip_tokenizer_init": True}
    from recurra.bench.prefix import as_record, plot, replay, table
    from recurra.bench.traces import KINDS, Trace, make_trace

    found = [make_trace(kind) for kind in KINDS] if traces is None else [
        Trace.load(path) for path in sorted(traces.glob("*.json"))
    ]  # fmt: skip
    rows = []
    for trace in found:
        note(f"[{trace.name}: {len(trace.calls)} calls]", quiet)
        rows.append(replay(trace, settings))
    write(table(rows) + "\n")
    if output is not None:
        record = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(), "version": __version__,
            "python": platform.python_version(), "model": Path(model).name, "rows": as_record(rows),
        }  # fmt: skip
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        plot(rows, output.with_suffix(".png"))
    return OK
