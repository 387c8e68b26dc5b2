"""Lines of input: an editor on a terminal, plain stdin elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from recurra.cli.console import note
from recurra.errors import RequestError


class Reader(Protocol):
    """Where the user's texts come from."""

    def read(self) -> str | None:
        """The next text, which may have several lines; None at the end."""
        ...


def from_stdin(read: Callable[[], str]) -> str:
    """What ``read`` gets from stdin.

    Raises:
        RequestError: bytes that are no UTF-8 text.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is no valid UTF-8 text: {error}", param="prompt") from error


class PlainReader:
    """Reads stdin; a backslash at a line's end continues the text on the next line."""

    def read(self) -> str | None:
        lines: list[str] = []
        for line in iter(lambda: from_stdin(sys.stdin.readline), ""):
            text = line.removesuffix("\n")
            if not text.endswith("\\"):
                return "\n".join([*lines, text])
            lines.append(text[:-1])
        return "\n".join(lines) if lines else None


class TerminalReader:
    """Edits on the terminal: history with the arrow keys, several lines with Alt-Enter.

    Args:
        prompt: shown before the text.
        words: completed with Tab at the text's beginning.
        session_options: for tests, handed to prompt-toolkit's session.
    """

    def __init__(self, prompt: str, words: Sequence[str] = (), **session_options: Any) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor(1)
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        self._session: PromptSession[str] = PromptSession(
            prompt,
            multiline=True,
            key_bindings=keys,
            prompt_continuation=lambda width, number, wrapped: " " * width,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            **session_options,
        )

    def read(self) -> str | None:
        while True:
            try:
                return self._session.prompt()
            except KeyboardInterrupt:
                note("(Ctrl-D or /exit leaves)")
            except EOFError:
                return None


def open_reader(prompt: str, words: Sequence[str] = ()) -> Reader:
    """The reader that suits stdin."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    return TerminalReader(prompt, words) if interactive else PlainReader()


def each_text(reader: Reader, handle: Callable[[str], bool]) -> None:
    """Hand texts to ``handle`` until it returns False or the input ends."""
    while (text := reader.read()) is not None:
        if not handle(text):
            return
