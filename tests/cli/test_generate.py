"""``recurra generate`` continues prompts from everywhere, in every form."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from cli_support import Result, Run

from recurra.cli import running
from recurra.cli.running import Interrupt, Speed, TextStream, ending
from recurra.types import CompletionOutput, RequestMetrics, RequestOutput

GREEDY = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos")


@pytest.fixture
def expected(chat_model: Path) -> str:
    """The greedy continuation of "A state", by the library."""
    from recurra import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return LLM(str(chat_model)).generate("A state", params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture
def careful_model(chat_model: Path, tmp_path: Path) -> Path:
    """The same model with sampling defaults of its own: greedy, five tokens."""
    folder = tmp_path / "careful"
    shutil.copytree(chat_model, folder)
    own = {"do_sample": False, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


def _answer_ids(result: Result) -> list[int]:
    ids: list[int] = json.loads(result.out)["outputs"][0]["token_ids"]
    return ids


def test_the_models_defaults_hold_until_a_flag_or_none(run: Run, careful_model: Path) -> None:
    ask = ("generate", careful_model, "-p", "A state", "--ignore-eos", "--json")
    greedy = run(*ask)
    assert "defaults of the model: max_tokens 5, temperature 0" in greedy.err
    assert len(_answer_ids(greedy)) == 5
    assert _answer_ids(run(*ask)) == _answer_ids(greedy)
    assert _answer_ids(run(*ask, "--max-tokens", 3)) == _answer_ids(greedy)[:3]
    drawn = ("--temperature", 50, "--seed", 1)
    assert _answer_ids(run(*ask, *drawn)) != _answer_ids(greedy)
    free = run(*ask, "--generation-config", "none", *drawn)
    assert len(_answer_ids(free)) == 256
    assert "defaults of the model" not in free.err


def test_a_bad_default_is_named(run: Run, careful_model: Path) -> None:
    (careful_model / "generation_config.json").write_text('{"temperature": "hot"}')
    for command in (("generate", careful_model, "-p", "x"), ("explain", careful_model)):
        result = run(*command)
        assert result.code == 1
        assert "generation_config.json: temperature must be a number, got 'hot'" in result.err


def test_prompt_comes_from_a_flag_a_file_or_stdin(
    run: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    result = run("generate", chat_model, "--prompt", "A state", *GREEDY)
    assert (result.code, result.out) == (0, expected + "\n")
    assert "prompt 2 tokens" in result.err
    assert "tokens/s" in result.err
    assert "--max-tokens" in result.err
    (tmp_path / "prompt.txt").write_text("A state\n")
    assert (
        run("generate", chat_model, "--prompt-file", tmp_path / "prompt.txt", *GREEDY).out == expected + "\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("A state\n"))
    quiet = run("generate", chat_model, "--quiet", *GREEDY)
    assert (quiet.out, quiet.err) == (expected + "\n", "")
    assert run("generate", chat_model, "-p", "A state", "--echo", *GREEDY).out == f"A state{expected}\n"


@pytest.mark.usefixtures("warm")
def test_warm_up_changes_no_answer(run: Run, chat_model: Path, expected: str) -> None:
    assert run("generate", chat_model, "-p", "A state", *GREEDY).out == expected + "\n"


def test_several_prompts_and_answers_are_titled(run: Run, chat_model: Path, expected: str) -> None:
    result = run("generate", chat_model, "-p", "A state", "-p", "-x", "--n", 2, *GREEDY)
    assert result.code == 0
    assert result.out.startswith(
        f"--- prompt 1, answer 1 ---\n{expected}\n--- prompt 1, answer 2 ---\n{expected}\n"
    )
    assert result.out.count("--- prompt 2") == 2
    assert "2 prompts, 24 tokens" in result.err


def test_json_has_everything(run: Run, chat_model: Path, expected: str) -> None:
    result = run("generate", chat_model, "-p", "A state", "-p", "B", "--json", "--logprobs", 1, *GREEDY)
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert first["outputs"][0]["text"] == expected
    assert len(first["outputs"][0]["token_ids"]) == len(first["outputs"][0]["logprobs"]) == 6
    assert first["outputs"][0]["finish_reason"] == "length"
    assert first["metrics"]["tokens_per_second"] > 0
    assert (second["prompt"], result.err) == ("B", "")


def test_token_ids_in_and_out(run: Run, ids_model: Path) -> None:
    result = run("generate", ids_model, "--prompt-token-ids", "1, 2 3", *GREEDY)
    shown = [int(part) for part in result.out.split()]
    listed = json.loads(run("generate", ids_model, "--prompt-token-ids", "1,2,3", "--json", *GREEDY).out)
    assert shown == listed["outputs"][0]["token_ids"]
    assert len(shown) == 6
    assert listed["prompt_token_ids"] == [1, 2, 3]
    refused = run("generate", ids_model, "-p", "text")
    assert refused.code == 1
    assert "tokenizer" in refused.err


def test_seed_repeats_and_its_absence_varies(run: Run, chat_model: Path) -> None:
    def text(*flags: object) -> str:
        return run("generate", chat_model, "-p", "A", "-q", "--max-tokens", 12, "--ignore-eos", *flags).out

    assert text("--seed", 5) == text("--seed", 5)
    assert len({text() for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["-p", ""], "--prompt : it is empty"),
        (["-p", "a", "--prompt-token-ids", "1"], "--prompt and --prompt-token-ids exclude each other"),
        (["--prompt-token-ids", "1,x"], "--prompt-token-ids 1,x: not a list of integers"),
        (["--prompt-token-ids", "99999"], "99999"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: can't be read"),
    ],
)
def test_prompts_that_cannot_work(run: Run, chat_model: Path, flags: list[str], problem: str) -> None:
    result = run("generate", chat_model, *flags)
    assert result.code in (1, 2)
    assert problem in result.err
    assert result.out == ""


def test_stdin_that_is_no_text(run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    result = run("generate", chat_model)
    assert result.code == 1
    assert "no valid UTF-8" in result.err


def test_ctrl_c_stops_the_answer(run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Interrupt", lambda: Interrupt(requested=True))
    result = run("generate", chat_model, "-p", "A", "--max-tokens", 5000, "--ignore-eos")
    assert result.code == 130
    assert "stopped" in result.err


def test_second_ctrl_c_ends_the_program() -> None:
    interrupt = Interrupt()
    interrupt._handle(2, None)
    assert interrupt.requested
    with pytest.raises(KeyboardInterrupt):
        interrupt._handle(2, None)


def test_speed_counts_the_answer_after_its_first_token() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finished_time=3.5)
    answers = [CompletionOutput(0, "", [1, 2, 3, 4, 5])]
    speed = Speed.of(RequestOutput("r", None, [7, 8], None, answers, True, metrics=metrics))
    assert speed == Speed(2, 5, 0.5, 2.0)
    assert speed.tokens_per_second == 2.0


def test_endings_are_said_in_words() -> None:
    def said(reason: str, stop: object = None) -> str:
        return ending(CompletionOutput(0, "", [], finish_reason=reason, stop_reason=stop))  # type: ignore[arg-type]

    assert said("length") == "; ended by --max-tokens"
    assert said("abort") == "; stopped"
    assert said("stop", "END") == "; stopped at 'END'"
    assert said("stop") == ""


def test_stream_gives_each_piece_once() -> None:
    text, ids = TextStream(ids_only=False), TextStream(ids_only=True)
    answer = CompletionOutput(0, "ab", [1, 2])
    assert (text.new(answer), ids.new(answer)) == ("ab", "1 2 ")
    answer = CompletionOutput(0, "abc", [1, 2, 3])
    assert (text.new(answer), ids.new(answer)) == ("c", "3 ")
    assert text.new(CompletionOutput(1, "z", [9])) == "z"
