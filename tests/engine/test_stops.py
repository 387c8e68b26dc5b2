"""Stop strings: the same cut wherever token boundaries fall, nothing shown too early."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import write_tokenizer
from recurra.engine.answers import Answer
from recurra.engine.stops import find_stop, held_back
from recurra.engine.tokenizer import Tokenizer
from recurra.sampling_params import SamplingParams
from recurra.types import Request

TEXT = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def letter_by_letter(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: the first moment at which the text so far ends in a stop; the longest one then."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.data())
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    cuts = [*sorted(data.draw(st.sets(st.integers(0, len(text))))), len(text)]
    shown, before = "", 0
    for cut in cuts:
        so_far = text[:cut]
        found = find_stop(so_far, stops, before)
        if found is not None:
            assert (so_far[: found.start], found.stop) == letter_by_letter(text, stops)
            assert so_far[: found.start].startswith(shown), "nothing shown is taken back"
            return
        visible = so_far[: len(so_far) - held_back(so_far, stops)]
        assert visible.startswith(shown)
        shown, before = visible, cut
    assert letter_by_letter(text, stops)[1] is None


@given(TEXT, STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    held = held_back(text, stops)
    expected = [n for s in stops for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])]
    assert held == max(expected, default=0)


@cache
def tokenizer(folder: str) -> Tokenizer:
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tok")
    write_tokenizer(folder)
    return tokenizer(str(folder))


def feed(
    tok: Tokenizer, text: str, params: SamplingParams, extra: list[int] | None = None
) -> tuple[Answer, list[str]]:
    """Push a text's tokens until the answer ends; the texts shown on the way."""
    answer, shown = Answer(Request("r", (1,), params), 0, frozenset([0]), tok), []
    for token in [*tok.encode(text), *(extra or [])]:
        answer.push(token, None)
        shown.append(answer.output().text)
        if answer.finished:
            break
    for early, late in pairwise(shown):
        assert late.startswith(early)
    return answer, shown


def test_a_stop_across_tokens_is_cut_and_never_shown(tok: Tokenizer) -> None:
    stop = "state is kept"
    assert len(tok.encode(stop)) > 2
    answer, shown = feed(tok, "In a state is kept what", SamplingParams(stop=stop, max_tokens=99))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("In a ", "stop", stop)
    assert all("state i" not in text for text in shown)


def test_include_stop_str_keeps_it_and_drops_what_follows(tok: Tokenizer) -> None:
    params = SamplingParams(stop=["dog sl"], include_stop_str_in_output=True, max_tokens=99)
    answer, _ = feed(tok, "the dog sleeps", params)
    assert answer.text == "the dog sl"


def test_a_held_tail_is_shown_when_the_answer_ends_without_its_stop(tok: Tokenizer) -> None:
    ids = tok.encode("keep it")
    answer, shown = feed(tok, "keep it", SamplingParams(stop="it!", max_tokens=len(ids)))
    assert answer.finish_reason == "length"
    assert shown[-1] == "keep it"
    answer, shown = feed(tok, "keep it", SamplingParams(stop="it!", max_tokens=99), extra=[0])
    assert (answer.finish_reason, answer.stop_reason, shown[-1]) == ("stop", None, "keep it")


def test_a_stop_string_beats_the_length_when_one_token_meets_both(tok: Tokenizer) -> None:
    ids = tok.encode("the dog")
    answer, _ = feed(tok, "the dog", SamplingParams(stop="dog", max_tokens=len(ids)))
    assert (answer.finish_reason, answer.text) == ("stop", "the ")


def test_stop_strings_that_were_complete_before_min_tokens_do_not_count(tok: Tokenizer) -> None:
    text = "dog cat dog"
    first = len(tok.encode("dog cat"))
    answer, _ = feed(tok, text, SamplingParams(stop="dog", min_tokens=first, max_tokens=99))
    assert (answer.text, answer.finish_reason) == ("dog cat ", "stop")


def test_an_end_token_before_min_tokens_is_an_ordinary_token(tok: Tokenizer) -> None:
    answer = Answer(Request("r", (1,), SamplingParams(min_tokens=2, max_tokens=9)), 0, frozenset([0]), tok)
    for token in (0, 0):
        answer.push(token, None)
        assert not answer.finished
    answer.push(0, None)
    assert (answer.finish_reason, answer.token_ids) == ("stop", [0, 0, 0])


def test_the_end_token_is_an_id_of_the_answer_but_no_text(tok: Tokenizer) -> None:
    params = SamplingParams(skip_special_tokens=False, max_tokens=99)
    answer, _ = feed(tok, "so", params, extra=[0])
    assert answer.text == "so"
    assert answer.token_ids[-1] == 0
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, max_tokens=99)
    answer, _ = feed(tok, "so", params, extra=[0])
    assert answer.text == "so" + tok.token_to_string(0)


def test_a_character_cut_by_the_length_limit_is_flushed(tok: Tokenizer) -> None:
    ids = tok.encode("字")
    assert len(ids) > 1
    answer, shown = feed(tok, "字", SamplingParams(max_tokens=len(ids) - 1))
    assert shown[:-1] == [""] * (len(shown) - 1)
    assert answer.text.endswith("\ufffd")


def test_without_detokenize_there_is_no_text(tok: Tokenizer) -> None:
    answer, _ = feed(tok, "the dog", SamplingParams(detokenize=False, max_tokens=2))
    assert answer.text == ""
    assert len(answer.token_ids) == 2
