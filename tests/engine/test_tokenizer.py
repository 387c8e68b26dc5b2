"""Tokenizers as checkpoint folders describe them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer_factories as made
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import CheckpointError, MissingDependencyError, RequestError


def load(folder: Path, **kwargs: Any) -> Tokenizer:
    tok = Tokenizer.from_folder(folder, **kwargs)
    assert tok is not None
    return tok


def hugging_face(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def test_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": made.END, "bos_token": made.END},
        {"eos_token": made.TURN, "add_bos_token": False, "bos_token": made.END},
        {"eos_token": made.TURN, "add_bos_token": True, "bos_token": made.END},
    ],
)
@pytest.mark.parametrize("with_bos", [False, True])
def test_encode_equals_transformers(tmp_path: Path, config: dict[str, Any], with_bos: bool) -> None:
    backend = made.with_bos(made.byte_level_bpe()) if with_bos else made.byte_level_bpe()
    folder = made.save(tmp_path, backend, tokenizer_config=config)
    ours, theirs = load(folder), hugging_face(folder)
    # Where the flag alone asks for a BOS, transformers 5 adds none; earlier ones and the models' training did.
    bos = 1 if config.get("add_bos_token") and not with_bos else 0

    @settings(max_examples=40, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), special=st.booleans())
    def check(text: str, special: bool) -> None:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids[bos if special else 0 :] == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)

    check()


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({"add_bos_token": True}, [0], []),
        ({"add_eos_token": True}, [], [1]),
        ({"add_bos_token": False}, [], []),
    ],
)
def test_flags_add_ends_where_the_post_processor_does_not(
    tmp_path: Path, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    names = {"eos_token": {"content": made.TURN}, "bos_token": {"content": made.END}}
    tok = load(made.save(tmp_path / "1", made.byte_level_bpe(), tokenizer_config=names | flags))
    text = tok.encode("text", add_special_tokens=False)
    assert tok.encode("text") == [*before, *text, *after]
    own = load(
        made.save(tmp_path / "2", made.with_bos(made.byte_level_bpe()), tokenizer_config=names | flags)
    )
    assert own.encode("text") == [0, *text]


def test_ids_that_end_an_answer_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = made.save(
        tmp_path,
        made.byte_level_bpe(),
        tokenizer_config={"eos_token": made.END},
        generation_config={"eos_token_id": [1, 7], "bos_token_id": 5},
        config={"eos_token_id": 99, "bos_token_id": 98},
    )
    tok = load(folder)
    assert tok.eos_token_ids == {0, 1, 7}
    assert tok.eos_token_id == 0
    assert tok.bos_token_id == 5


def test_model_config_names_the_end_where_nothing_else_does(tmp_path: Path) -> None:
    folder = made.save(tmp_path, made.byte_level_bpe(), config={"eos_token_id": [3, 4], "bos_token_id": 2})
    tok = load(folder)
    assert (tok.eos_token_ids, tok.eos_token_id, tok.bos_token_id) == ({3, 4}, 3, 2)


def test_generation_config_is_the_models_where_the_tokenizer_lies_elsewhere(tmp_path: Path) -> None:
    folder = made.save(tmp_path / "tokenizer", made.byte_level_bpe())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    assert load(folder, model_path=tmp_path).eos_token_ids == {6}
    assert load(folder).eos_token_ids == frozenset()


def test_special_tokens_map_and_added_tokens_are_honoured(tmp_path: Path) -> None:
    backend = made.byte_level_bpe()
    size = backend.get_vocab_size()
    folder = made.save(
        tmp_path,
        backend,
        special_tokens_map={"eos_token": "a", "additional_special_tokens": ["b"]},
        tokenizer_config={"added_tokens_decoder": {str(size): {"content": "<new>", "special": True}}},
    )
    tok = load(folder)
    assert tok.encode("<new>") == [size]
    assert tok.vocab_size == size + 1
    assert tok.decode([size, *tok.encode("cab!")]) == "c!"
    assert tok.decode(tok.encode("cab!"), skip_special_tokens=False) == "cab!"


def test_contradicting_ids_are_refused(tmp_path: Path) -> None:
    folder = made.save(
        tmp_path, made.byte_level_bpe(),
        tokenizer_config={"added_tokens_decoder": {"7": {"content": made.END, "special": True}}},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"gives '<\|end\|>' the id 7, tokenizer.json 0"):
        load(folder)


def test_vocabulary_larger_than_the_models_is_refused(tmp_path: Path) -> None:
    tok = load(made.save(tmp_path, made.byte_level_bpe()))
    tok.check_vocab(tok.vocab_size)
    tok.check_vocab(tok.vocab_size + 100)
    with pytest.raises(CheckpointError, match="wrong vocabulary"):
        tok.check_vocab(tok.vocab_size - 1)


def test_length_settings_of_training_never_cut_a_prompt(tmp_path: Path) -> None:
    backend = made.byte_level_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tok = load(made.save(tmp_path, backend))
    assert tok.decode(tok.encode("a sentence that goes on")) == "a sentence that goes on"
    assert len(tok.encode("a sentence that goes on")) > 3
    assert len(tok.encode("x")) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer", "{broken"),
        ("tokenizer", "{}"),
        ("tokenizer_config", "{broken"),
        ("tokenizer_config", "[1]"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    made.save(tmp_path, made.byte_level_bpe())
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"{name}.json"):
        load(tmp_path)


def test_lone_surrogate_is_refused(tmp_path: Path) -> None:
    tok = load(made.save(tmp_path, made.byte_level_bpe()))
    with pytest.raises(RequestError, match="Unicode"):
        tok.encode("a\ud800")


def test_tokens_alone(tmp_path: Path) -> None:
    tok = load(made.save(tmp_path, made.byte_level_bpe(), tokenizer_config={"eos_token": made.END}))
    the, half = tok.encode("so the")[-1], tok.encode("é")[0]
    assert tok.token_to_string(the) == " the"
    assert tok.token_to_bytes(the) == b" the"
    assert tok.token_to_string(half) == "\ufffd"
    assert tok.token_to_bytes(half) == b"\xc3"
    assert tok.token_to_string(0) == made.END
    assert tok.token_to_string(10_000) == tok.token_to_string(-1) == ""
    assert tok.token_to_bytes(10_000) == b""
    words = load(made.save(tmp_path / "words", made.wordpiece()))
    piece = words.encode("state")[0]
    assert words.token_to_bytes(piece) == words.token_to_string(piece).encode() != b""


def test_older_vocabulary_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"tokenizer.model but no tokenizer.json.*transformers"):
        Tokenizer.from_folder(tmp_path)


def test_older_vocabulary_is_converted(tmp_path: Path) -> None:
    backend = made.byte_level_bpe()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": made.END, "unk_token": made.END})
    )
    text = "the quick naïve 😀"
    assert load(tmp_path).encode(text, add_special_tokens=False) == backend.encode(text).ids


def test_unusable_older_vocabulary_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"tokenizer.model but no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
