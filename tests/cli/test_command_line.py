"""The command line itself: help, versions, mistakes, exit codes, and how quickly it starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run

import recurra
from recurra.cli import app
from recurra.errors import RecurraError

COMMANDS = ("generate", "chat", "complete", "run-batch", "serve", "explain", "collect-env")


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.code, result.out.strip()) == (0, recurra.__version__)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_every_command(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"recurra {name}" in result.out


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["genrate"]],
)
def test_starts_quickly_and_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from recurra.cli import main; main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else 0)"
    )
    times = []
    for _ in range(2):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    assert min(times) < 1.0


def test_no_command_needs_torch_for_its_help_or_for_a_wrong_flag() -> None:
    code = (
        "import sys\nfrom recurra.cli import main\n"
        "heavy = ('torch', 'numpy', 'numba', 'triton', 'transformers', 'tokenizers', 'fastapi')\n"
        "for name in sys.argv[1:]:\n"
        "    assert main([name, '--help']) == 0\n"
        "    assert main([name, '--no-such-flag']) == 2\n"
        "    loaded = [package for package in heavy if package in sys.modules]\n"
        "    assert not loaded, (name, loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recurra", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, recurra.__version__)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["genrate"], 'Did you mean "generate"?'),
        (["zzz"], "There are: generate, chat"),
        (["generate"], "MODEL is missing"),
        (["generate", ".", "--tempature", "1"], "Did you mean --temperature?"),
        (["generate", ".", "--max-tokens", "many"], "--max-tokens"),
        (["serve", ".", "--mamba-backend", "tritn"], 'Did you mean "triton"?'),
        (["generate", ".", "-p", "x"], "config.json"),
    ],
)
def test_wrong_usage_is_one_red_line_and_a_way_on(run: Run, arguments: list[str], problem: str) -> None:
    result = run(*arguments)
    assert result.code in (1, 2)
    assert problem in result.err
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert result.out == ""


def test_unknown_model_folders(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mamba2-130m").mkdir()
    result = run("generate", tmp_path / "mamba2-130n", "-p", "x")
    assert (result.code, result.out) == (2, "")
    assert f"Did you mean {tmp_path}/mamba2-130m?" in result.err
    assert "hf download org/model --local-dir model" in run("generate", "org/model", "-p", "x").err
    assert "Give a checkpoint folder" in run("generate", tmp_path / "other", "-p", "x").err
    (tmp_path / "file").write_text("")
    assert "not a checkpoint folder" in run("generate", tmp_path / "file", "-p", "x").err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--temperature", "-1"], "temperature must be from 0 to 100, got -1.0"),
        (["--mamba-backend", "flashinfer"], "--mamba-backend flashinfer: "),
        (["--mamba-ssu-algorithm", "simple"], "--mamba-ssu-algorithm simple: only the flashinfer backend"),
        (["--mamba-cache-philox-rounds", "99"], "--mamba-cache-philox-rounds 99: out of range"),
        (["--dtype", "float8"], "--dtype float8"),
        (["--logit-bias", "{5"], "--logit-bias {5: not JSON"),
        (["--quantization", "int4"], "--quantization int4: not offered yet"),
        (["--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(
    run: Run, chat_model: Path, flags: list[str], problem: str
) -> None:
    result = run("generate", chat_model, "-p", "x", *flags)
    assert result.code in (1, 2)
    assert problem in result.err
    assert result.err.startswith("error: ")


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(RecurraError):
        run("generate", "/nowhere", "-p", "x", "--debug")


def _raising(error: BaseException) -> Any:
    def build() -> Any:
        def command(*args: Any, **kwargs: Any) -> None:
            raise error

        return command

    return build


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (BrokenPipeError(), 0), (RecurraError("x"), 1), (ZeroDivisionError("x"), 1)],
)
def test_endings_are_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    monkeypatch.setattr(app, "build_app", _raising(error))
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert run("x").code == code


def test_reader_that_leaves_early_is_no_error(chat_model: Path) -> None:
    command = f"{sys.executable} -m recurra generate {chat_model} -p A -q --max-tokens 2000 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
