"""A conversation and its slash commands, apart from any terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recurra.errors import ConfigError

HELP = """\
/system TEXT  set the system message (alone: show it)
/reset        forget the conversation; the system message stays
/retry        answer the last message anew
/save FILE    write the conversation to FILE: JSON, or Markdown if it ends in .md
/help         this list
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer. Alt-Enter or a backslash at a line's end begins another line."""

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """Turns so far; the whole of it is the prompt of the next answer."""

    model: str
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """What the chat template gets."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    def ask(self, text: str) -> None:
        """Add the user's turn."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the model's turn."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question and its answer; returns the question."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def save(self, path: Path) -> None:
        """Write everything said.

        Raises:
            ConfigError: the file can't be written.
        """
        if path.suffix == ".md":
            text = "\n\n".join(f"**{m['role']}**\n\n{m['content']}" for m in self.messages) + "\n"
        else:
            record = {"model": self.model, "messages": self.messages}
            text = json.dumps(record, ensure_ascii=False, indent=2) + "\n"
        try:
            path.expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("/save", str(path), f"can't be written ({error.strerror}).") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a line of input leads to.

    Attributes:
        say: a remark for the user.
        ask: a question for the model.
        leave: the end.
    """

    say: str = ""
    ask: str | None = None
    leave: bool = False


def _system(chat: Conversation, rest: str) -> Outcome:
    if rest:
        chat.system = rest
        return Outcome("The system message is set, from the next answer on.")
    return Outcome(chat.system or "There is no system message.")


def _reset(chat: Conversation, rest: str) -> Outcome:
    chat.turns.clear()
    return Outcome("The conversation is forgotten.")


def _retry(chat: Conversation, rest: str) -> Outcome:
    question = chat.take_back()
    return Outcome("There is nothing to answer yet.") if question is None else Outcome(ask=question)


def _save(chat: Conversation, rest: str) -> Outcome:
    if not rest:
        return Outcome("Say where: /save FILE")
    chat.save(Path(rest))
    return Outcome(f"Saved to {rest}.")


def _help(chat: Conversation, rest: str) -> Outcome:
    return Outcome(HELP)


def _exit(chat: Conversation, rest: str) -> Outcome:
    return Outcome(leave=True)


COMMANDS: dict[str, Callable[[Conversation, str], Outcome]] = {
    "/system": _system, "/reset": _reset, "/retry": _retry, "/save": _save, "/help": _help, "/exit": _exit,
    "/quit": _exit,
}  # fmt: skip


def interpret(chat: Conversation, line: str) -> Outcome:
    """A slash command is obeyed; anything else is a question. ``//text`` asks ``/text``."""
    text = line.strip()
    if not text:
        return Outcome()
    if text.startswith("//"):
        return Outcome(ask=text[1:])
    if not text.startswith("/"):
        return Outcome(ask=text)
    name, _, rest = text.partition(" ")
    if name not in COMMANDS:
        return Outcome(
            f"There is no command {name}; /help lists them. To say it to the model, write /{name}."
        )
    try:
        return COMMANDS[name](chat, rest.strip())
    except ConfigError as error:
        return Outcome(str(error))
