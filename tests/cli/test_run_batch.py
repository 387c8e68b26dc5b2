"""``recurra run-batch``: every line gets a result, and a run that was killed goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Result, Run, records

from recurra.cli import running
from recurra.cli.batch_lines import BadLine, OutputFile, Task, parse_line
from recurra.cli.running import Interrupt
from recurra.errors import ConfigError

BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def completion(custom_id: str, **body: Any) -> str:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "A", **BODY, **body},
        }
    )


def conversation(custom_id: str, **body: Any) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "url": "/v1/chat/completions",
            "body": {"messages": messages, **BODY, **body},
        }
    )


@pytest.fixture
def batch(run: Run, chat_model: Path, tmp_path: Path) -> Any:
    """Run lines as a batch; returns the ending and the results by custom_id."""

    def call(*lines: str, flags: tuple[object, ...] = ()) -> tuple[Result, dict[Any, Any]]:
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        result = run(
            "run-batch", chat_model, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags
        )
        found = records(tmp_path / "out.jsonl") if (tmp_path / "out.jsonl").exists() else []
        return result, {record["custom_id"] or record["line"]: record for record in found}

    return call


def test_answers_equal_those_of_the_library(batch: Any, chat_model: Path) -> None:
    from recurra import LLM, SamplingParams

    result, found = batch(
        completion("text", prompt=["A", "B"]), conversation("talk", n=2, model="chatty"), completion("ids", prompt=[1, 2])
    )  # fmt: skip
    assert result.code == 0
    assert "3 requests answered, 0 failed; 20 tokens" in result.err
    llm = LLM(str(chat_model))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts: list[Any] = ["A", "B", [1, 2], "<user>hi\n<assistant>"]
    a, b, ids, talk = (out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False))
    assert [c["text"] for c in found["text"]["response"]["body"]["choices"]] == [a, b]
    assert found["ids"]["response"]["body"]["choices"][0]["text"] == ids
    said = [c["message"]["content"] for c in found["talk"]["response"]["body"]["choices"]]
    assert said == [talk, talk]
    assert found["text"]["response"]["status_code"] == 200
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 8
    assert found["text"]["error"] is None


def test_bad_lines_are_results_and_not_fatal(batch: Any) -> None:
    result, found = batch(
        "{broken",
        completion("good"),
        "[1]",
        json.dumps({"url": "/v1/completions", "body": {}}),
        completion("good"),
        completion("limit", max_tokens=-1),
        completion("typo", max_tokns=1),
        completion("model", model="gpt-4"),
        completion("stream", stream=True),
        completion("empty", prompt=""),
        completion("type", prompt=5),
        conversation("role") .replace('"role": "user"', '"role": "tool"'),
        json.dumps({"custom_id": "url", "url": "/v1/embeddings", "body": {}}),
        json.dumps({"custom_id": "method", "method": "GET", "url": "/v1/completions", "body": {}}),
    )  # fmt: skip
    assert result.code == 0
    assert "1 requests answered, 13 failed" in result.err
    assert "error: 13 requests failed" in result.err
    for line in (1, 3, 4, 5):
        assert found[line]["error"]["code"] == "invalid_line"
        assert f"line {line}: " in found[line]["error"]["message"]
    statuses = {k: r["response"]["status_code"] for k, r in found.items() if r["response"] is not None}
    assert statuses == {
        "good": 200, "limit": 400, "typo": 400, "model": 404, "stream": 400, "empty": 400, "type": 400,
        "role": 400, "url": 404,
    }  # fmt: skip
    assert "max_tokens" in found["typo"]["response"]["body"]["error"]["message"]
    assert found["method"]["error"]["message"].endswith("only POST is known")


def test_more_requests_than_slots(batch: Any) -> None:
    lines = [completion(f"r{i}", prompt=f"word {i}") for i in range(23)]
    result, found = batch(*lines, flags=("--max-num-seqs", 2))
    assert (result.code, len(found)) == (0, 23)


def test_killed_run_goes_on_where_it_ended(batch: Any, tmp_path: Path) -> None:
    lines = [completion("a"), "{broken", completion("b"), completion("c")]
    batch(*lines)
    whole = (tmp_path / "out.jsonl").read_text()
    kept = [line for line in whole.splitlines(keepends=True) if '"b"' not in line]
    torn = next(line for line in whole.splitlines(keepends=True) if '"b"' in line)
    (tmp_path / "out.jsonl").write_text("".join(kept) + torn[:40])
    result, found = batch(*lines)
    assert "holds 3 results" in result.err
    assert "1 requests answered, 0 failed" in result.err
    after = (tmp_path / "out.jsonl").read_text()
    assert after.startswith("".join(kept))
    assert sorted(map(str, found)) == ["2", "a", "b", "c"]
    again, _ = batch(*lines)
    assert (again.code, (tmp_path / "out.jsonl").read_text()) == (0, after)
    assert "Nothing is left to do" in again.err
    fresh, found = batch(completion("z"), flags=("--overwrite",))
    assert (fresh.code, list(found)) == (0, ["z"])


def test_output_survives_a_run_that_cannot_start(run: Run, chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(completion("a") + "\n")
    (tmp_path / "out.jsonl").write_text('{"custom_id": "old"}\n')
    files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--overwrite")
    assert run("run-batch", chat_model, *files, "--dtype", "nonsense").code == 2
    assert (tmp_path / "out.jsonl").read_text() == '{"custom_id": "old"}\n'


def test_ctrl_c_keeps_what_is_done(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Interrupt", lambda: Interrupt(requested=True))
    result, found = batch(completion("a"))
    assert (result.code, found) == (130, {})


def test_other_names_for_the_model(batch: Any) -> None:
    flags = ("--served-model-name", "gpt-4")
    _, found = batch(completion("a", model="gpt-4"), completion("b", model="chatty"), flags=flags)
    assert found["a"]["response"]["status_code"] == 200
    assert found["b"]["response"]["status_code"] == 404


def test_files_that_cannot_work(run: Run, chat_model: Path, tmp_path: Path) -> None:
    there = tmp_path / "in.jsonl"
    there.write_text(completion("a") + "\n")
    assert "--input" in run("run-batch", chat_model, "-i", tmp_path / "no", "-o", tmp_path / "o").err
    assert "it is the input" in run("run-batch", chat_model, "-i", there, "-o", there).err
    (tmp_path / "poem").write_text("roses\n")
    other = run("run-batch", chat_model, "-i", there, "-o", tmp_path / "poem")
    assert "line 1 is no batch result" in other.err
    assert (tmp_path / "poem").read_text() == "roses\n"
    assert "can't be written" in run("run-batch", chat_model, "-i", there, "-o", "/nowhere/out").err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "not JSON"),
        ('"text"', "a str, not a JSON object"),
        ('{"custom_id": 5}', "custom_id is missing"),
        ('{"custom_id": "a", "body": {}}', "url is missing"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body is missing"),
    ],
)
def test_lines_that_are_no_request(text: str, problem: str) -> None:
    bad = parse_line(7, text)
    assert isinstance(bad, BadLine)
    assert (bad.line, problem in bad.problem) == (7, True)


def test_line_that_is_a_request() -> None:
    task = parse_line(1, '{"custom_id": "a", "url": "/v1/completions", "body": {"x": 1}}')
    assert task == Task(1, "a", "/v1/completions", {"x": 1})


def test_output_is_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path, overwrite=False) as output:
        output.write({"custom_id": "ä\n\u2028"})
        assert path.read_bytes().count(b"\n") == 1
        assert records(path) if False else json.loads(path.read_bytes())["custom_id"] == "ä\n\u2028"
    with OutputFile(path, overwrite=False) as output:
        assert output.done.custom_ids == {"ä\n\u2028"}
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="no batch result"):
        OutputFile(path, overwrite=False)
