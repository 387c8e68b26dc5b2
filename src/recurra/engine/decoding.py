"""What each token adds to text, read off a tokenizer's own decoder.

Three kinds of decoder cover the field. *Byte-level* ones turn every token into bytes. *Piece* ones
(SentencePiece style) turn a token into text or, for ``<0x0A>``, into one byte. Of both, a token's part
is known by itself, so a stream needs no second look. All others are decoded a few tokens at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\ufffd"

#: Error handler of UTF-8 decoding that gives each undecodable byte its own U+FFFD, as SentencePiece does.
EACH_BYTE = "recurra.each_byte"


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT, error.start + 1


codecs.register_error(EACH_BYTE, _replace_one_byte)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token's part of the text.

    Attributes:
        data: bytes of the token (UTF-8 unless ``raw``).
        raw: the bytes may begin or end inside a character.
        first: the bytes when no token with text comes before.
    """

    data: bytes
    raw: bool
    first: bytes


def _byte_level_alphabet() -> dict[str, int]:
    """Character of GPT-2's printable alphabet to the byte it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(token: str) -> Piece:
    mapped = [_ALPHABET.get(char) for char in token]
    # A token with a character outside the alphabet (an added one, with a space say) is plain text.
    known = [byte for byte in mapped if byte is not None]
    data = bytes(known) if len(known) == len(mapped) else token.encode()
    return Piece(data, True, data)


def _byte_of(token: str) -> int | None:
    """0x41 for ``<0x41>``; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@dataclass(frozen=True)
class Decoding:
    """How ids become text.

    Attributes:
        kind: "bytes" (byte-level), "pieces" (SentencePiece style) or "window" (any other).
        errors: codec error handler for undecodable bytes.
        strip: spaces taken off the start of the whole text.
        piece: token string to its part of the text; not called for "window".
    """

    kind: Literal["bytes", "pieces", "window"]
    errors: str
    strip: int
    piece: Callable[[str], Piece]


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _text_step(step: dict[str, Any]) -> tuple[str, str, str] | None:
    """(pattern, replacement, replacement in the first token) of a step that edits each token alone."""
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"], step["content"]
    if step["type"] == "Metaspace":
        first = " " if step.get("prepend_scheme", "always") == "never" else ""
        return step["replacement"], " ", first
    return None


def _pieces(steps: list[dict[str, Any]]) -> Decoding | None:
    """Decoding of ``(Replace | Metaspace)* ByteFallback? Fuse? Strip?``; None for another chain."""
    rest = list(steps)
    edits: list[tuple[str, str, str]] = []
    while rest and (edit := _text_step(rest[0])) is not None:
        edits.append(edit)
        rest.pop(0)
    fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[1:] if fallback else rest
    fused = bool(rest) and rest[0]["type"] == "Fuse"
    rest = rest[1:] if fused else rest
    strip = 0
    if fused and rest and rest[0]["type"] == "Strip" and not rest[0]["stop"] and rest[0]["content"] == " ":
        strip = rest.pop(0)["start"]
    if rest or not (edits or fallback or fused):
        return None

    def piece(token: str) -> Piece:
        text = first = token
        for pattern, replacement, at_start in edits:
            text, first = text.replace(pattern, replacement), first.replace(pattern, at_start)
        byte = _byte_of(text) if fallback else None
        if byte is not None:
            return Piece(bytes([byte]), True, bytes([byte]))
        return Piece(text.encode(), False, first.encode())

    return Decoding("pieces", EACH_BYTE, strip, piece)


def compile_decoding(tokenizer: FastTokenizer) -> Decoding:
    """Classify the decoder of ``tokenizer``."""
    steps = _steps(json.loads(tokenizer.to_str()).get("decoder"))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoding("bytes", "replace", 0, _byte_level_piece)
    plain = Piece(b"", False, b"")
    return _pieces(steps) or Decoding("window", "replace", 0, lambda _: plain)


def decode_window(tokenizer: FastTokenizer, ids: Sequence[int]) -> str:
    """Text of a few ids through the tokenizer's own decoder, special tokens kept."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
