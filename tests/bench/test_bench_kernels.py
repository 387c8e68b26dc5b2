"""``recurra bench kernels``: what is wrong isn't timed, and what is right is held to the ceilings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recurra.bench import kernels
from recurra.bench.kernel_cases import Sizes, make_cases
from recurra.bench.kernel_peers import PEERS
from recurra.cli.app import run
from recurra.device import detect
from recurra.ops import build

TINY = Sizes(2, 9, 4, 8, 16, 2)
OPERATORS = {
    "causal_conv1d_update", "selective_state_update", "causal_conv1d_varlen", "mamba_chunk_scan_varlen",
    "rms_norm_gated",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ceilings", lambda *_: kernels.Ceilings(10.0, 100.0))
    monkeypatch.setattr(kernels, "SMALL", TINY)


def test_every_backend_is_right_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "k.json"
    assert run(["bench", "kernels", "--device", "cpu", "--output", str(out)]) == 0
    record = json.loads(out.read_text())
    assert {(r["operator"], r["impl"]) for r in record["rows"]} == {
        (o, i) for o in OPERATORS for i in ("cpu", "reference")
    }
    for row in record["rows"]:
        least = row["nbytes"] / 10.0 / 1e3
        if row["operator"] == "mamba_chunk_scan_varlen":
            least = max(least, row["operations"] / 100.0 / 1e3)
        assert row["fraction_of_ceiling"] == pytest.approx(least / row["us"])
        assert row["error"] < 1e-4
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "of ceiling" in capsys.readouterr().out


def test_what_is_wrong_or_refuses_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = build(detect("cpu"))

    def off(*arguments: Any, **options: Any) -> Tensor:
        return ops.rms_norm_gated(*arguments, **options) * 1.01

    def refuses(*arguments: Any, **options: Any) -> Tensor:
        raise ValueError("no such GPU")

    found = [("theirs", off), ("others", refuses), ("cpu", ops.rms_norm_gated)]
    monkeypatch.setattr(kernels, "_implementations", lambda *_: iter(found))
    case = list(make_cases(TINY, torch.device("cpu"), torch.float32, 4))[-1]
    rows = list(kernels._rows(case, detect("cpu"), torch.float32, kernels.Ceilings(10.0, 100.0)))
    assert [row.us is None for row in rows] == [True, True, False]
    assert rows[0].refused.startswith("wrong by 1.0e-02")
    assert rows[1].refused == "ValueError: no such GPU"
    assert "not timed: wrong by" in kernels.table(kernels.Ceilings(10.0, 100.0), rows)


def test_a_state_left_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = build(detect("cpu"))

    def forgets(pool: Tensor, *arguments: Any) -> Tensor:
        return ops.selective_state_update(pool.clone(), *arguments)

    monkeypatch.setattr(kernels, "_implementations", lambda *_: iter([("theirs", forgets)]))
    case = list(make_cases(TINY, torch.device("cpu"), torch.float32, 4))[1]
    (row,) = kernels._rows(case, detect("cpu"), torch.float32, kernels.Ceilings(10.0, 100.0))
    assert row.us is None


def test_peers_that_are_not_installed_are_left_out() -> None:
    for peer in PEERS:
        assert peer.load("rms_norm_gated") is None
