"""Load is drawn as asked, and times are those that happened."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from recurra.bench.serve import first_model, serve_calls
from recurra.bench.times import Timed, percentile, summary
from recurra.bench.workload import Call, Workload
from recurra.cli.app import run

MODEL = Path(__file__).parents[2] / "models" / "recurra-tiny"


def test_arrivals_keep_the_rate() -> None:
    poisson = Workload(2000, rate=50.0).calls()
    gaps = [b.at - a.at for a, b in pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.15), "an exponential's spread is its mean"
    fixed = Workload(5, rate=4.0, poisson=False).calls()
    assert [call.at for call in fixed] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {call.at for call in Workload(5).calls()} == {0.0}


def test_prompts_share_what_they_should_and_fit_the_vocabulary() -> None:
    calls = Workload(9, input_len=5, shared_prefix=7, vocab_size=40).calls()
    assert {tuple(call.prompt[:7]) for call in calls} == {tuple(calls[0].prompt[:7])}
    assert len({tuple(call.prompt[7:]) for call in calls}) == 9
    assert {len(call.prompt) for call in calls} == {12}
    assert max(token for call in calls for token in call.prompt) < 40
    assert Workload(9, seed=1).calls() == Workload(9, seed=1).calls() != Workload(9, seed=2).calls()


def test_chat_lengths_vary_around_their_median() -> None:
    lengths = sorted(len(call.prompt) for call in Workload(801, mix="chat").calls())
    assert lengths[400] == pytest.approx(120, rel=0.2)
    assert lengths[-1] > 10 * lengths[80]


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([4.0], 99) == 4.0


def test_summary_counts_what_failed_apart() -> None:
    found = summary([Timed(0.0, [1.0, 1.5, 3.0], 10), Timed(1.0, [2.0], 20), Timed(0.5, [], 5, "gone")])
    assert (found["requests"], found["failed"], found["seconds"]) == (3, 1, 3.0)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 3, abs=0.05)
    assert found["total_tokens_per_s"] == pytest.approx(34 / 3, abs=0.05)
    assert found["time_to_first_token_ms"]["mean"] == 1000
    assert found["time_between_tokens_ms"]["mean"] == 1000


def _answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "served"}]})
    body = json.loads(request.content)
    if body["prompt"] == [13]:
        return httpx.Response(400, json={"error": {"message": "not that one"}})
    events = [{"choices": [{"text": "x"}]}, {"choices": [{"text": "yz"}]}]
    events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return httpx.Response(200, text=text)


def test_streams_of_a_server_are_timed_and_refusals_reported() -> None:
    async def measure() -> tuple[str, list[Timed]]:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(_answer), base_url="http://here"
        ) as client:
            calls = [Call(0.0, [1, 2], 3), Call(0.05, [13], 3)]
            return await first_model(client), await serve_calls(client, "served", calls)

    name, (good, bad) = asyncio.run(measure())
    assert name == "served"
    assert len(good.tokens) == 3, "the count at the end makes up for events of two tokens"
    assert not good.error
    assert "not that one" in bad.error
    assert bad.start - good.start >= 0.04


def test_commands_measure_the_shipped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--num-threads", "1", "--quiet", "--input-len", "9", "--output-len", "4"]
    target = tmp_path / "latency.json"
    found = run(["bench", "latency", str(MODEL), "--batch", "1", "--batch", "3", "--roofline",
                 "--output", str(target), *common])  # fmt: skip
    assert found == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["times_floor"] > 0.0  # below 1 where a small model fits into a cache
        assert row["step_ms"]["p50"] > 0
    assert target.with_suffix(".png").exists()
    target = tmp_path / "throughput.json"
    assert run(["bench", "throughput", str(MODEL), "--requests", "3", "--shared-prefix", "4",
                "--output", str(target), *common]) == 0  # fmt: skip
    (row,) = json.loads(target.read_text())["rows"]
    assert (row["requests"], row["failed"], row["shared_prefix"]) == (3, 0, 4)
    assert "time to first token" in capsys.readouterr().out


def test_wrong_numbers_are_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "throughput", str(MODEL), "--requests", "0"]) == 2
    assert "--requests" in capsys.readouterr().err
    assert run(["bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "recurra serve" in capsys.readouterr().err
