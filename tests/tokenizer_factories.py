"""Small tokenizers of every decoder family, trained on the spot.

>>> backend = byte_level_bpe()
>>> folder = save(tmp_path, backend, tokenizer_config={"eos_token": "<|end|>"})
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "A state space model reads a sentence once and keeps what matters in a small state.",
    "The quick brown fox jumps over the lazy dog; the dog sleeps on, and nothing is forgotten.",
    "Numbers such as 3, 14, 159 and 2653 follow, then naïve café words, don't they?",
    "  two  spaces   three\n\tand a tab; e\u0301 combines, ﬁ is a ligature.",
]
END = "<|end|>"
TURN = "<|turn|>"
_SPECIAL = [END, TURN]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe(add_prefix_space: bool = False) -> Tokenizer:
    """As GPT-2, GPT-NeoX, Mamba, FalconMamba."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("日本", normalized=False)])
    return backend


def llama_bpe(strip: bool = True) -> Tokenizer:
    """As Llama, Mistral and Codestral Mamba after conversion: BPE with byte fallback."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=440, special_tokens=["<unk>", *_SPECIAL, *_BYTES], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    return _unmark_bytes(backend)


def unigram() -> Tokenizer:
    """As T5: pieces of a unigram model, and the Metaspace decoder."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", *_SPECIAL], unk_token="<unk>", show_progress=False
        ),
    )
    return backend


def unigram_byte_fallback() -> Tokenizer:
    """As SentencePiece's unigram with byte fallback, decoded by a Metaspace first."""
    state = json.loads(unigram().to_str())
    state["model"]["byte_fallback"] = True
    state["model"]["vocab"] += [[token, -20.0] for token in _BYTES]
    backend: Tokenizer = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def wordpiece() -> Tokenizer:
    """As BERT."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        TEXT,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *_SPECIAL], show_progress=False),
    )
    return backend


def end_of_word_bpe() -> Tokenizer:
    """As the first GPT: a suffix marks a word's end."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", *_SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def whole_words() -> Tokenizer:
    """Words, and no decoder at all."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>", *_SPECIAL], show_progress=False)
    )
    return backend


def _unmark_bytes(backend: Tokenizer) -> Tokenizer:
    """Make byte tokens ordinary ones; the trainer knows them as special tokens only."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in _BYTES]
    return Tokenizer.from_str(json.dumps(state))


def with_bos(backend: Tokenizer) -> Tokenizer:
    """Let the post-processor put ``END`` before a text, as a BOS."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))]
    )
    return backend


def save(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    """Write tokenizer.json and, for each ``name=object``, ``name.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
