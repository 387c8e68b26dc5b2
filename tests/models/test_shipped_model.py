"""The shipped model: its files, its tokenizer, and that it still predicts text that it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "recurra-tiny"
HELD_OUT = Path(__file__).parent / "data" / "heldout.txt"
#: It scores 1.877 nats a token; with every decay e times faster (A_log + 1) it scores 2.028.
LOSS_BOUND = 1.90


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def read_json(name: str) -> dict[str, object]:
    return json.loads((MODEL / name).read_text())


def test_folder_is_small() -> None:
    assert sum(p.stat().st_size for p in MODEL.iterdir()) < 25_000_000


def test_config_and_weights_agree() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["Mamba2ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["num_heads"] * config["head_dim"] == config["expand"] * config["hidden_size"]
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        names = set(file.keys())
        shape = file.get_slice("backbone.embeddings.weight").get_shape()
        finite = all(torch.isfinite(file.get_tensor(name)).all() for name in names)
    assert shape == [config["vocab_size"], config["hidden_size"]]
    assert "lm_head.weight" not in names
    assert sum(name.endswith("A_log") for name in names) == config["num_hidden_layers"]
    assert finite


def test_special_tokens_agree(tokenizer: Tokenizer) -> None:
    config = read_json("config.json")
    ids = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")]
    assert config["eos_token_id"] == ids
    assert read_json("generation_config.json")["eos_token_id"] == ids
    assert config["pad_token_id"] == tokenizer.token_to_id("<|pad|>")
    assert tokenizer.get_vocab_size() == config["vocab_size"]


@pytest.mark.parametrize(
    "text",
    ["plain words", "  two  spaces\n\n\ttab", "naïve 東京 🙂", "x = f(1_000, 3.14)\r\n", "0123456789", ""],
)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_held_out_loss_in_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(HELD_OUT.read_text()).ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    assert float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])) < LOSS_BOUND


def test_chat_template_writes_the_trained_format() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": " Define river. "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = (
        "<|endoftext|><|user|>Hello<|end|><|assistant|>Hi!<|end|><|user|>Define river.<|end|><|assistant|>"
    )
    assert text == expected
    assert len(tokenizer.apply_chat_template(messages, return_dict=False)) == len(
        Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text.removesuffix("<|assistant|>")).ids
    )
