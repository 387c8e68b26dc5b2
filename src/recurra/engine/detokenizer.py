"""Text from a stream of tokens, a piece as soon as it can no longer change."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recurra.engine.decoding import REPLACEMENT, decode_window

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer

#: Tokens that a "window" decoder may hold back while their text ends in U+FFFD.
_MAX_HELD = 8
#: Prompt tokens that a "window" decoder sees before the answer.
_CONTEXT = 8
#: A UTF-8 character that is not whole is at most this long.
_MAX_PARTIAL = 3


class Detokenizer:
    """Turns one answer's tokens into text as they come; O(1) amortised a token.

    All that ``push`` returned, then ``flush``, is the answer's text: what decoding prompt and answer
    together adds to the prompt (a leading space stays where the prompt has text). A character whose
    bytes span tokens comes with its last byte; bytes that never become one come as U+FFFD.

    Args:
        tokenizer: whose tokens they are.
        skip_special_tokens: special tokens add no text.
        prompt_ids: the prompt, for the answer's first space and for a character that it cut.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._parts: list[str] = []
        self._windowed = tokenizer.decoding.kind == "window"
        if self._windowed:
            self._context = [i for i in prompt_ids[-4 * _CONTEXT :] if self._has_text(i)][-_CONTEXT:]
            self._held: list[int] = []
        else:
            self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.decoding.errors)
            self._begun = False
            self._strip = tokenizer.decoding.strip
            self._read_prompt(prompt_ids)

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that it settles, perhaps none."""
        if not self._has_text(token_id):
            return ""
        return self._keep(self._window(token_id) if self._windowed else self._bytes(token_id))

    def flush(self) -> str:
        """End the answer; return what was held back."""
        if self._windowed:
            return self._keep(self._release() if self._held else "")
        return self._keep(self._strip_start(self._decoder.decode(b"", final=True)))

    def _keep(self, new: str) -> str:
        if new:
            self._parts.append(new)
        return new

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.piece(token_id) is not None

    def _bytes(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        assert piece is not None
        data = piece.data if self._begun else piece.first
        self._begun = True
        if piece.raw:
            return self._strip_start(self._decoder.decode(data))
        return self._strip_start(self._decoder.decode(b"", final=True) + data.decode())

    def _strip_start(self, new: str) -> str:
        while self._strip and new:
            if new[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                new = new[1:]
        return new

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Put the state where decoding the whole prompt would leave it, reading only its two ends."""
        position = 0
        while position < len(prompt_ids) and not (self._begun and self._strip == 0):
            if self._has_text(prompt_ids[position]):
                self._bytes(prompt_ids[position])
            position += 1
        self._decoder.reset()
        tail = self._tail_bytes(prompt_ids)
        lead = max((i for i, byte in enumerate(tail) if byte >= 0xC0), default=None)
        if lead is not None:
            self._decoder.decode(tail[lead:])

    def _tail_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Last bytes of the run of bytes that ends the prompt, at most those of a partial character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if not self._has_text(token_id):
                continue
            piece = self._tokenizer.piece(token_id)
            if piece is None or not piece.raw or len(tail) >= _MAX_PARTIAL:
                break
            tail = piece.data + tail
        return tail[-_MAX_PARTIAL:]

    def _window(self, token_id: int) -> str:
        self._held.append(token_id)
        text = decode_window(self._tokenizer.backend, self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        return self._release()

    def _release(self) -> str:
        before = decode_window(self._tokenizer.backend, self._context)
        after = decode_window(self._tokenizer.backend, [*self._context, *self._held])
        self._context, self._held = self._held, []
        return after[len(before) :]
