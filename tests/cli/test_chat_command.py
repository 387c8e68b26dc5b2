"""``recurra chat`` and ``recurra complete``."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from recurra.cli.conversation import HELP, Conversation, Outcome, interpret
from recurra.cli.reading import PlainReader, TerminalReader, each_text

FLAGS = ("--temperature", 0, "--max-tokens", 6, "--ignore-eos")


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def greedy(model: Path, prompt: str) -> str:
    from recurra import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return LLM(str(model)).generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_answers_follow_the_template_and_the_history(
    run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transcript = tmp_path / "talk.json"
    type_in(monkeypatch, f"hi\nand more\n/save {transcript}\n")
    result = run("chat", chat_model, "--system", "Be brief.", *FLAGS)
    first = greedy(chat_model, "<system>Be brief.\n<user>hi\n<assistant>")
    second = greedy(
        chat_model, f"<system>Be brief.\n<user>hi\n<assistant>{first}\n<user>and more\n<assistant>"
    )
    assert (result.code, result.out) == (0, f"{first}\n{second}\n")
    assert "tokens/s" in result.err
    saved = json.loads(transcript.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert saved["messages"][4]["content"] == second


def test_reset_and_retry(run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "hi\n/retry\n/reset\nhi\n/exit\nnever\n")
    result = run("chat", chat_model, "-q", *FLAGS)
    first = greedy(chat_model, "<user>hi\n<assistant>")
    assert result.out == f"{first}\n" * 3


def test_message_that_the_template_refuses_is_taken_back(
    run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        "{{ messages | length }}"
    )
    type_in(monkeypatch, "bad\ngood\n")
    result = run("chat", chat_model, "-q", "--chat-template", template, *FLAGS)
    assert "no bad words" in result.err
    assert result.out == greedy(chat_model, "1") + "\n"


def test_model_without_template_or_tokenizer(run: Run, plain_model: Path, ids_model: Path) -> None:
    result = run("chat", plain_model)
    assert result.code == 2
    assert "--chat-template" in result.err
    assert "recurra complete" in result.err
    assert "no tokenizer" in run("chat", ids_model).err
    assert "no tokenizer" in run("complete", ids_model).err


def test_complete_goes_on_after_an_empty_line(
    run: Run, plain_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "A state\n\nB\n")
    result = run("complete", plain_model, "-q", *FLAGS)
    first = greedy(plain_model, "A state")
    again = greedy(plain_model, "A state" + first)
    assert result.out == f"A state{first}\n{again}\nB{greedy(plain_model, 'B')}\n"


def test_commands() -> None:
    chat = Conversation("m")
    assert interpret(chat, "  ") == Outcome()
    assert interpret(chat, "hello ") == Outcome(ask="hello")
    assert interpret(chat, "//path") == Outcome(ask="/path")
    assert interpret(chat, "/help").say == HELP
    assert interpret(chat, "/exit").leave
    assert "There is no command /nope" in interpret(chat, "/nope").say
    assert interpret(chat, "/system").say == "There is no system message."
    assert interpret(chat, "/system Be kind").say
    assert interpret(chat, "/system").say == "Be kind"
    assert interpret(chat, "/retry").ask is None
    assert interpret(chat, "/save").say == "Say where: /save FILE"
    chat.ask("q")
    chat.answer("a")
    assert interpret(chat, "/retry") == Outcome(ask="q")
    assert chat.turns == []
    chat.ask("q")
    interpret(chat, "/reset")
    assert chat.messages == [{"role": "system", "content": "Be kind"}]


def test_transcript_as_markdown_and_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    chat = Conversation("m", "S", [{"role": "user", "content": "q"}])
    interpret(chat, f"/save {tmp_path / 'a.md'}")
    assert (tmp_path / "a.md").read_text() == "**system**\n\nS\n\n**user**\n\nq\n"
    assert "can't be written" in interpret(chat, "/save /nowhere/x.json").say


def test_plain_input_continues_lines_after_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "one\ntwo \\\nthree\n\nlast\\")
    reader, read = PlainReader(), []
    while (text := reader.read()) is not None:
        read.append(text)
    assert read == ["one", "two \nthree", "", "last"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\ntwo\r", "one"),
        ("typo\x03hello\r", "hello"),
        ("\x04", None),
    ],
)
def test_terminal_keys(keys: str, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any]
    with create_pipe_input() as pipe:
        options = {"input": pipe, "output": DummyOutput()}
        pipe.send_text(keys)
        assert TerminalReader("> ", ["/help"], **options).read() == text
    assert ("Ctrl-D" in capsys.readouterr().err) == ("\x03" in keys)


def test_reading_ends_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "a\nb\nc\n")
    seen: list[str] = []
    each_text(PlainReader(), lambda text: seen.append(text) or text != "b")  # type: ignore[func-returns-value]
    assert seen == ["a", "b"]


def test_a_session_goes_on_where_it_was_left(
    run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = tmp_path / "talk"
    type_in(monkeypatch, "hi\n")
    first = run("chat", chat_model, "--session", name, "--system", "Be brief.", *FLAGS)
    type_in(monkeypatch, "and more\n")
    second = run("chat", chat_model, "--session", name, *FLAGS)
    text = first.out.rstrip("\n")
    whole = greedy(chat_model, f"<system>Be brief.\n<user>hi\n<assistant>{text}\n<user>and more\n<assistant>")
    assert second.out == whole + "\n"
    assert "2 messages, resumed from" in second.err
    (tmp_path / "talk.safetensors").write_bytes(b"damaged")
    type_in(monkeypatch, "/retry\n")
    third = run("chat", chat_model, "--session", name, *FLAGS)
    assert third.out == whole + "\n"
    assert "4 messages; they are read anew" in third.err
    (tmp_path / "talk.json").write_text("{")
    assert "can't be read" in run("chat", chat_model, "--session", name, *FLAGS).err
    assert "no name of a session" in run("chat", chat_model, "--session", "a b", *FLAGS).err
