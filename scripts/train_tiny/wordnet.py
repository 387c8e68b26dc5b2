"""WordNet's database files as dictionary entries."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
# Entries that a demo had better not recite.
UNFIT = re.compile(
    r"\b(slang|offensive|disparag\w*|derogat\w*|obscen\w*|vulgar\w*|slurs?|sexual\w*|sex|genital\w*|prostitut\w*|penis|"
    r"vagina\w*|copulat\w*|masturbat\w*|ethnic|Negro\w*|Black person|homosexual\w*|rape|pornograph\w*|orgasm|excrement|"
    r"feces|nigger|lynch\w*|Nazi\w*)\b",
    re.IGNORECASE,
)
FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}


@dataclass
class Synset:
    key: str
    pos: str
    words: list[str]
    definition: str
    examples: list[str]
    parents: list[str] = field(default_factory=list)
    instance: bool = False
    fit: bool = True
    antonyms: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


@dataclass
class Entry:
    word: str
    senses: list[Synset]
    count: int
    """How often the word was tagged in WordNet's sense-annotated texts: a measure of how common it is."""


def held_out(key: str, percent: float = 2.0) -> bool:
    """Whether a document belongs to the held-out part: a fixed hash of its name."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 10_000 < percent * 100


def _clean(word: str) -> str:
    return re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ")


def _synset(line: str, letter: str) -> Synset:
    data, _, gloss = line.partition(" | ")
    parts = data.split()
    count = int(parts[3], 16)
    words = [_clean(w) for w in parts[4 : 4 + 2 * count : 2]]
    at = 4 + 2 * count
    pointers = parts[at + 1 : at + 1 + 4 * int(parts[at])]
    examples = [e.strip() for e in re.findall(r'"([^"]+)"', gloss)]
    definition = re.split(r';?\s*"', gloss, maxsplit=1)[0].strip().rstrip(";:, ")
    definition = re.sub(
        r"[,;(]?\s*\b(e\.g|i\.e|as in|such as|especially in the phrase)\.?,?$", "", definition
    ).rstrip(";:, .")
    synset = Synset(letter + parts[0], POS[parts[2]], words, definition, examples)
    for symbol, offset, pos, ends in zip(*[iter(pointers)] * 4, strict=True):
        target = ("a" if pos == "s" else pos) + offset
        if symbol in {"@", "@i"}:
            synset.parents.append(target)
            synset.instance |= symbol == "@i"
        elif symbol == "!":
            source = words[int(ends[:2], 16) - 1]
            synset.antonyms.setdefault(source, []).append((target, int(ends[2:], 16) - 1))
    return synset


def read_synsets(folder: Path) -> dict[str, Synset]:
    synsets = {}
    for name, letter in FILES.items():
        for line in (folder / f"data.{name}").read_text().splitlines():
            if not line.startswith("  "):
                synset = _synset(line, letter)
                synset.fit = len(synset.definition) > 2 and not UNFIT.search(
                    line.partition("|")[2] + " ".join(synset.words)
                )
                synsets[synset.key] = synset
    return synsets


def read_entries(folder: Path, synsets: dict[str, Synset]) -> dict[str, Entry]:
    """Every lemma with its senses, the most frequent first, over all parts of speech."""
    tagged: dict[tuple[str, str], int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, _, count = line.split()
        lemma, rest = key.split("%")
        letter = "nvara"[int(rest[0]) - 1]
        tagged[lemma, letter] = tagged.get((lemma, letter), 0) + int(count)
    found: dict[str, list[tuple[int, list[Synset]]]] = {}
    for name, letter in FILES.items():
        for line in (folder / f"index.{name}").read_text().splitlines():
            if line.startswith("  "):
                continue
            parts = line.split()
            offsets = parts[-int(parts[2]) :]
            senses = [synsets[letter + offset] for offset in offsets]
            found.setdefault(parts[0], []).append((tagged.get((parts[0], letter), 0), senses))
    entries = {}
    for lemma, groups in found.items():
        groups.sort(key=lambda g: -g[0])
        senses = [s for _, group in groups for s in group if s.fit]
        if not senses:
            continue
        word = next(
            (w for w in senses[0].words if w.lower() == lemma.replace("_", " ")), lemma.replace("_", " ")
        )
        entries[word] = Entry(word, senses, sum(g[0] for g in groups))
    return entries


def sense_text(word: str, synset: Synset, synsets: dict[str, Synset]) -> str:
    text = synset.definition
    if synset.examples:
        text += ": " + "; ".join(f'"{e}"' for e in synset.examples[:2])
    text += "."
    others = [w for w in synset.words if w != word][:4]
    if others:
        text += f" Synonyms: {', '.join(others).rstrip('.')}."
    opposite = antonym(word, synset, synsets)
    if opposite:
        text += f" Opposite: {opposite}."
    if synset.parents:
        text += f" {'One of' if synset.instance else 'A kind of'}: {synsets[synset.parents[0]].words[0]}."
    return text


def antonym(word: str, synset: Synset, synsets: dict[str, Synset]) -> str | None:
    for key, index in synset.antonyms.get(word, []):
        return synsets[key].words[index]
    return None


def entry_text(entry: Entry, senses: list[Synset], synsets: dict[str, Synset]) -> str:
    """A dictionary entry: the word, then its senses numbered within each part of speech."""
    lines = [entry.word]
    for pos in dict.fromkeys(s.pos for s in senses):
        group = [s for s in senses if s.pos == pos][:8]
        lines.append(f"\n{pos}")
        for number, synset in enumerate(group, 1):
            label = f"{number}. " if len(group) > 1 else ""
            lines.append(label + sense_text(entry.word, synset, synsets))
    return "\n".join(lines)
