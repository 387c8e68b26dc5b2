"""Checkpoints and a way to run the command in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import Result, Run

from checkpoints import write_mamba2
from recurra.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def _wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output doesn't depend on who runs the tests."""
    for name in ("FORCE_COLOR", "RECURRA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start without their warm-up, which costs more than most tests here."""
    from recurra.engine.engine import LLMEngine

    if "warm" not in request.fixturenames:
        monkeypatch.setattr(LLMEngine, "warm_up", lambda self, progress=None: None)


@pytest.fixture
def warm() -> None:
    """Asks for the real warm-up."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``recurra`` with arguments, in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Mamba-2 with a tokenizer and a chat template."""
    folder = write_mamba2(tmp_path_factory.mktemp("models") / "chatty", tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return write_mamba2(tmp_path_factory.mktemp("models") / "plain", tokenizer=True)


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    return write_mamba2(tmp_path_factory.mktemp("models") / "ids")
