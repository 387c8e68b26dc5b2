"""Streaming text equals text decoded at once, on every decoder family."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

import tokenizer_factories as made
from recurra.engine.detokenizer import Detokenizer
from recurra.engine.tokenizer import Tokenizer

FAMILIES = {
    "byte_level": made.byte_level_bpe,
    "byte_level_prefix": lambda: made.byte_level_bpe(add_prefix_space=True),
    "llama": made.llama_bpe,
    "gemma": lambda: made.llama_bpe(strip=False),
    "unigram": made.unigram,
    "unigram_byte_fallback": made.unigram_byte_fallback,
    "wordpiece": made.wordpiece,
    "end_of_word": made.end_of_word_bpe,
    "whole_words": made.whole_words,
}
BYTE_FALLBACK = ("llama", "gemma", "unigram_byte_fallback")


@cache
def tokenizer(family: str) -> Tokenizer:
    backend: FastTokenizer = FAMILIES[family]()
    end = backend.token_to_id(made.END)
    return Tokenizer(backend, {"eos_token": made.END}, None, frozenset([end]))


def stream(tok: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tok, skip, prompt or [])
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces


def random_ids(family: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer(family).vocab_size
    return st.lists(st.integers(0, size + 2), max_size=24)


def lone_bytes(tok: Tokenizer, ids: list[int]) -> bool:
    """Whether some run of byte tokens is no valid UTF-8."""
    run = b""
    for token_id in [*ids, None]:
        piece = tok.piece(token_id) if token_id is not None else None
        if token_id in tok.special_ids or (token_id is not None and piece is None):
            continue  # neither adds text, so neither ends a run
        if piece is not None and piece.raw:
            run += piece.data
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return True
        run = b""
    return False


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_text_equals_text_decoded_at_once(family: str) -> None:
    tok = tokenizer(family)

    @settings(max_examples=150, deadline=None)
    @given(ids=random_ids(family), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        text = "".join(stream(tok, ids, skip))
        assert text == tok.decode(ids, skip_special_tokens=skip)
        if family not in BYTE_FALLBACK or (skip and not lone_bytes(tok, ids)):
            assert text == tok.backend.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_unicode_text_survives_the_round_trip_as_the_library_decodes_it(family: str) -> None:
    tok = tokenizer(family)

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def check(text: str) -> None:
        ids = tok.encode(text)
        streamed = "".join(stream(tok, ids))
        assert streamed == tok.backend.decode(ids)
        if family == "byte_level" and made.END not in text and made.TURN not in text:
            assert streamed == text

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_is_what_it_adds_to_the_prompt(family: str) -> None:
    tok = tokenizer(family)

    @settings(max_examples=100, deadline=None)
    @given(prompt=random_ids(family), ids=random_ids(family))
    def check(prompt: list[int], ids: list[int]) -> None:
        partial = Detokenizer(tok)
        settled = "".join(partial.push(i) for i in prompt)
        answer = "".join(stream(tok, ids, prompt=prompt))
        assert settled + answer == tok.decode([*prompt, *ids])

    check()


@pytest.mark.parametrize("family", ["byte_level", "llama", "gemma", "unigram_byte_fallback"])
def test_emoji_comes_with_its_last_token(family: str) -> None:
    tok = tokenizer(family)
    ids = tok.encode("a😀b")
    parts = stream(tok, ids)
    assert parts.count("😀") == 1
    at = parts.index("😀")
    assert parts[at - 3 : at] == ["", "", ""]
    assert "".join(parts) == "a😀b"


@pytest.mark.parametrize("family", ["byte_level", *BYTE_FALLBACK])
def test_bytes_that_end_inside_a_character_are_flushed_as_replacement(family: str) -> None:
    tok = tokenizer(family)
    ids = tok.encode("x😀")[:-1]
    parts = stream(tok, ids)
    assert "\ufffd" not in "".join(parts[:-1])
    assert set(parts[-1]) == {"\ufffd"}


def test_broken_run_keeps_its_whole_characters() -> None:
    tok = tokenizer("llama")
    ids = [tok.backend.token_to_id(f"<0x{b:02X}>") for b in (*"😀".encode(), 0x80, 0xE2, 0x82, 0x41)]
    assert "".join(stream(tok, ids)) == "😀\ufffd\ufffd\ufffdA" == tok.decode(ids)


def test_first_space_goes_at_the_text_start_only() -> None:
    tok = tokenizer("llama")
    ids = tok.encode("model")
    assert tok.token_to_string(ids[0])[0] == " "
    assert "".join(stream(tok, ids)) == "model"
    assert "".join(stream(tok, ids, prompt=tok.encode("state"))) == " model"
    end = tok.backend.token_to_id(made.END)
    assert "".join(stream(tok, ids, prompt=[end])) == "model"


def test_special_tokens_are_text_only_when_asked() -> None:
    tok = tokenizer("byte_level")
    ids = [*tok.encode("a"), tok.backend.token_to_id(made.TURN), *tok.encode("b")]
    assert "".join(stream(tok, ids, skip=True)) == "ab"
    assert "".join(stream(tok, ids, skip=False)) == f"a{made.TURN}b"


def test_added_token_with_a_space_is_plain_text() -> None:
    tok = tokenizer("byte_level")
    assert "".join(stream(tok, tok.encode("so two words日本!"))) == "so two words日本!"


def test_prompt_that_ends_inside_a_character_gives_it_to_the_answer() -> None:
    tok = tokenizer("byte_level")
    ids = tok.encode("a😀")
    assert "".join(stream(tok, ids[-1:], prompt=ids[:-1])) == "😀"


@pytest.mark.parametrize("family", ["byte_level", "llama", "wordpiece"])
def test_cost_of_a_token_does_not_grow(family: str) -> None:
    tok = tokenizer(family)
    # Bytes that never make a character are the worst case: nothing is ever settled by looking at text.
    ids = [i for i in range(tok.vocab_size) if tok.token_to_string(i).endswith("\ufffd")] or tok.encode("a b")
    many = (ids * (20_000 // len(ids) + 1))[:20_000]
    detokenizer = Detokenizer(tok)

    def seconds(part: list[int]) -> float:
        start = time.perf_counter()
        for token_id in part:
            detokenizer.push(token_id)
        return time.perf_counter() - start

    seconds(many[:4_000])
    early = min(seconds(many[:4_000]) for _ in range(2))
    seconds(many[4_000:])
    late = min(seconds(many[:4_000]) for _ in range(3))
    assert late < 5 * early + 0.01
