"""From the unpacked packages to tokens: clean, split by document, train the tokenizer, pack.

Writes tokens.npz (uint16, ``DOMAIN.train`` and ``DOMAIN.heldout``), meta.json, tokenizer.json and
heldout-DOMAIN.txt into --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
from chat import conversations, focused_conversations, python_facts, sql_facts
from text import html_text, pod_text, rst_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from wordnet import entry_text, held_out, read_entries, read_synsets

SPECIAL = ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# The share of training windows drawn from each domain.
WEIGHTS = {
    "python": 0.25,
    "wordnet": 0.22,
    "chat": 0.15,
    "postgresql": 0.12,
    "perl": 0.10,
    "django": 0.09,
    "sqlite": 0.07,
}
# The second, short stage leans on conversations about common words and the library's functions.
FOCUS_WEIGHTS = {
    "python": 0.14,
    "wordnet": 0.10,
    "chat": 0.46,
    "postgresql": 0.10,
    "perl": 0.07,
    "django": 0.06,
    "sqlite": 0.07,
}
# Numbers one digit at a time; words with their leading space; runs of signs and of white space.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def documents(
    root: Path, paths: Iterable[Path], convert: Callable[[str], str], domain: str
) -> dict[str, str]:
    """Name to plain text, of the pages with at least 400 characters of it."""
    out = {}
    for path in sorted(paths):
        text = convert(read(path))
        if len(text) >= 400:
            out[f"{domain}:{path.relative_to(root)}"] = text
    return out


def mostly_words(paragraph: str) -> bool:
    """False for what teaches nothing: tables of symbols, numbers, rulers, long tokens without spaces."""
    if len(paragraph) < 40:
        return True
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    ascii_share = sum(c.isascii() for c in paragraph) / len(paragraph)
    longest = max(len(word) for word in paragraph.split())
    return letters > 0.6 * len(paragraph) and ascii_share > 0.9 and longest < 100


def deduplicated(docs: dict[str, str]) -> dict[str, str]:
    """Each paragraph of 60 characters or more stays where it came first, over all documents."""
    seen: set[bytes] = set()
    out = {}
    for name, text in docs.items():
        kept = []
        for paragraph in re.split(r"\n\n+", text):
            key = re.sub(r"\W+", " ", paragraph.lower()).strip()
            digest = hashlib.sha256(key.encode()).digest()[:12]
            if not mostly_words(paragraph) or (len(key) >= 60 and digest in seen):
                continue
            seen.add(digest)
            kept.append(paragraph.rstrip())
        rest = "\n\n".join(kept)
        if len(rest) >= 300:
            out[name] = rest
    return out


def manuals(share: Path) -> dict[str, str]:
    python = share / "doc/python3.11/html/_sources"
    rst = [p for p in python.rglob("*.rst.txt") if p.parent.name != "includes" and p.name not in
           {"changelog.rst.txt", "license.rst.txt", "contents.rst.txt", "copyright.rst.txt"}]  # fmt: skip
    postgres = share / "doc/postgresql-doc-15/html"
    html = [
        p
        for p in postgres.glob("*.html")
        if not re.match(r"(release|bookindex|biblio|index|legalnotice|contrib-dblink)", p.name)
    ]
    sqlite = [p for p in (share / "doc/sqlite3").rglob("*.html") if not re.match(
        r"(keyword_index|sitemap|doclist|changes|toc|cves|news|releaselog|chronology|requirements|rejected)", p.name)]  # fmt: skip
    django = share / "doc/python-django-doc/html"
    dj = [
        p
        for p in django.rglob("*.html")
        if p.parts[len(django.parts)] in {"intro", "topics", "ref", "howto", "faq", "misc", "internals"}
    ]
    pods = [p for p in (share / "perl").rglob("*.pod") if not re.match(
        r"perl(\d+delta|delta|toc|hist|cn|jp|ko|tw|ebcdic|uniprops|gpl|artistic|intern|api|modlib|vms|bs2000|hpux)", p.name)]  # fmt: skip
    return {
        **documents(python, rst, rst_text, "python"),
        **documents(postgres, html, html_text, "postgresql"),
        **documents(share / "doc/sqlite3", sqlite, html_text, "sqlite"),
        **documents(django, dj, html_text, "django"),
        **documents(share / "perl", pods, pod_text, "perl"),
    }


def new_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Each document behind an ``<|endoftext|>``, one after another."""
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [[end, *encoding.ids] for encoding in tokenizer.encode_batch(texts)]
    return np.array([*chain.from_iterable(ids), end], dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of fetch_data.sh")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--focus", action="store_true", help="the second stage's mix: common words only, more conversations"
    )
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    args = parser.parse_args()
    share = args.data / "root/usr/share"
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)

    pages = deduplicated(manuals(share))
    parts: dict[str, tuple[list[str], list[str]]] = {d: ([], []) for d in WEIGHTS}
    for name, text in pages.items():
        parts[name.split(":")[0]][held_out(name)].append(text)

    synsets = read_synsets(share / "wordnet")
    entries = read_entries(share / "wordnet", synsets)
    for entry in entries.values():
        first_held = held_out(entry.senses[0].key)
        if " " in entry.word and entry.senses[0].words[0] != entry.word:
            continue  # a phrase is listed under its synset's first name alone
        if args.focus and entry.count < 3:
            continue
        senses = [s for s in entry.senses if held_out(s.key) == first_held]
        parts["wordnet"][first_held].append(entry_text(entry, senses, synsets))
    facts = python_facts(share / "doc/python3.11/html/_sources") + sql_facts(
        {n: t for n, t in pages.items() if n.startswith("postgresql:")}
    )
    parts["chat"] = (focused_conversations if args.focus else conversations)(
        entries, synsets, facts, args.seed
    )

    for train, held in parts.values():
        rng.shuffle(train)
        rng.shuffle(held)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer([t for train, _ in parts.values() for t in train], args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"))

    arrays, meta = (
        {},
        {
            "weights": FOCUS_WEIGHTS if args.focus else WEIGHTS,
            "end_of_text": tokenizer.token_to_id("<|endoftext|>"),
            "heldout_bytes": {},
            "tokens": {},
        },
    )
    for domain, (train, held) in parts.items():
        arrays[f"{domain}.train"], arrays[f"{domain}.heldout"] = pack(tokenizer, train), pack(tokenizer, held)
        meta["heldout_bytes"][domain] = sum(len(t.encode()) for t in held)
        meta["tokens"][domain] = [
            arrays[f"{domain}.train"].size,
            arrays[f"{domain}.heldout"].size,
            len(train),
            len(held),
        ]
        (args.out / f"heldout-{domain}.txt").write_text("\n\n<|endoftext|>\n\n".join(held))
        (args.out / f"sample-{domain}.txt").write_text("\n\n<|endoftext|>\n\n".join(train[:40]))
        print(
            "{}: train tokens {}, held-out tokens {}, documents {} + {}".format(
                domain, *meta["tokens"][domain]
            )
        )
    np.savez_compressed(args.out / "tokens.npz", **arrays)
    (args.out / "meta.json").write_text(json.dumps(meta, indent=1))
    print("facts", len(facts), "total", sum(v[0] for v in meta["tokens"].values()))


if __name__ == "__main__":
    main()
