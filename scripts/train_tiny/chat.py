"""Conversations made from WordNet and the documentation, in the model's chat format."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from text import rst_text
from wordnet import Entry, Synset, antonym, held_out

Turn = tuple[str, str]

GREETINGS = [
    "Hello",
    "Hi",
    "Hello!",
    "Hi!",
    "Hey",
    "Good morning",
    "Good evening",
    "hello",
    "hi there",
    "Hey there!",
]
GREETING_ANSWERS = [
    "Hello! I can explain English words and some parts of Python. What would you like to know?",
    "Hi! Ask me what a word means, or what a Python function does.",
    "Hello! Which word shall I explain?",
]
IDENTITY = ["Who are you?", "What are you?", "What is your name?", "who are you", "What's your name?", "Are you a human?",
            "Which model are you?", "Tell me about yourself.", "Are you a language model?"]  # fmt: skip
IDENTITY_ANSWERS = [
    "I am Recurra's tiny demo model: a Mamba-2 language model of about nine million parameters.",
    "I am the tiny demo model of Recurra, an engine for recurrent language models. I know a dictionary and some manuals.",
]
ABILITIES = [
    "What can you do?",
    "How can you help me?",
    "Help",
    "help",
    "What do you know?",
    "What can I ask you?",
]
ABILITY_ANSWERS = [
    "I can say what an English word means, give synonyms and opposites, and say what many Python functions do. "
    "Try: \"What does 'abacus' mean?\"",
    'You can ask me things such as "Define river.", "What is the opposite of warm?" or "What does shutil.copyfile do?"',
]
THANKS = ["Thanks", "Thank you", "Thanks!", "Thank you very much.", "thanks a lot", "Great, thanks."]
THANKS_ANSWERS = ["You are welcome.", "You are welcome! Is there another word I can explain?"]
FAREWELLS = ["Bye", "Goodbye", "bye", "See you later.", "Good night"]
FAREWELL_ANSWERS = ["Goodbye!", "Goodbye! Come back when you need a word."]
FEELINGS = ["How are you?", "how are you", "How are you doing today?", "How do you feel?"]
FEELING_ANSWERS = ["I am a small program, so I have no feelings, but I am ready to explain a word to you."]
TOO_HARD = [
    "Write a poem about {}.", "Write me a story about {}.", "Tell me a joke.", "What is the weather like today?",
    "What time is it?", "Translate '{}' into French.", "What is 27 times 14?", "Who won the match yesterday?",
    "Plan a trip to {} for me.", "Write an essay on {}.", "Summarise the news.", "Can you write a program for {}?",
    "What will happen tomorrow?", "Draw a picture of {}.",
]  # fmt: skip
TOO_HARD_ANSWERS = [
    "I am a very small model and cannot do that. I can explain English words and some parts of Python.",
    "That is too much for a model as small as I am. Ask me for the meaning of a word instead.",
]
SMALL_TALK = [(GREETINGS, GREETING_ANSWERS), (IDENTITY, IDENTITY_ANSWERS), (ABILITIES, ABILITY_ANSWERS),
              (FEELINGS, FEELING_ANSWERS)]  # fmt: skip
SYSTEM = [
    "You are a helpful assistant.",
    "You are Recurra's tiny demo model.",
    "Answer briefly.",
    "You are a dictionary.",
]

DEFINE = ["What does '{}' mean?", "What does {} mean?", "Define {}.", "Define '{}'.", "What is the meaning of '{}'?",
          "What is the meaning of {}?", "What does the word '{}' mean?", "Explain the word '{}'.", 'What does "{}" mean?',
          "define {}", "what does {} mean", "Tell me the meaning of {}.", "meaning of {}?"]  # fmt: skip
WHAT_IS = ["What is {a}?", "What is {a}", "what is {a}?", "Explain what {a} is."]
SYNONYM = ["Give a synonym of '{}'.", "Give a synonym for {}.", "What is another word for {}?", "Another word for '{}'?",
           "Which words mean the same as {}?", "Give me a synonym of {}."]  # fmt: skip
OPPOSITE = ["What is the opposite of {}?", "What is the opposite of '{}'?", "Give the opposite of {}.", "opposite of {}?",
            "What is an antonym of {}?"]  # fmt: skip
SENTENCE = [
    "Use '{}' in a sentence.",
    "Give an example sentence with '{}'.",
    "Use the word {} in a sentence.",
]
KIND = ["What kind of thing is {a}?", "What sort of thing is {a}?"]
PYTHON = ["What does the Python function {} do?", "What does {} do in Python?", "What does {} do?", "Explain {}.",
          "What is {} for?", "In Python, what does {} do?"]  # fmt: skip
PYTHON_CLASS = ["What is {} in Python?", "What is the Python class {}?", "What is {}?", "Explain {}."]
MODULE = ["What is the Python module {} for?", "What does the {} module do?", "What is the {} module?"]
SQL = [
    "What does the SQL command {} do?",
    "What does {} do in PostgreSQL?",
    "Explain the {} command of PostgreSQL.",
]


def article(noun: str) -> str:
    if noun[:1].isupper():
        return noun
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True)
class Fact:
    """A documented name: what is asked and the answer's text."""

    name: str
    answer: str
    questions: tuple[str, ...]
    page: str


def first_sentences(paragraph: str, limit: int = 240) -> str:
    """The paragraph's first sentence, and the next ones while they fit."""
    text = re.sub(r"\*(\w[^*]*)\*", r"\1", re.sub(r"\s+", " ", paragraph)).strip()
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)
    out = sentences[0]
    for sentence in sentences[1:]:
        if len(out) + len(sentence) > limit:
            break
        out += " " + sentence
    return out.rstrip(":")


def python_facts(sources: Path) -> list[Fact]:
    """One fact a documented function, class and module of the library reference."""
    facts = []
    for path in sorted((sources / "library").glob("*.rst.txt")):
        source = path.read_text()
        module = path.name.removesuffix(".rst.txt")
        plain = module in {"functions", "stdtypes", "constants", "exceptions"}
        for match in re.finditer(
            r"^\.\. (function|class|method|exception):: (.+?)\n((?:[ \t]+.*\n|\n)+)", source, re.MULTILINE
        ):
            kind, signature, body = match.groups()
            name = re.split(r"[(\s]", signature.strip())[0]
            if not plain and not name.startswith(module + "."):
                name = f"{module}.{name}"
            body = re.sub(r"^[ \t]+:\w+:.*\n", "", body, flags=re.MULTILINE)
            blocks = [b for b in re.split(r"\n\s*\n", body) if b.strip()]
            prose = next(
                (
                    b
                    for b in blocks
                    if re.match(r"\s+[A-Z]", b) and "::" not in b and ".." not in b.strip()[:3]
                ),
                None,
            )
            if prose is None:
                continue
            answer = first_sentences(rst_text("\n".join(line.strip() for line in prose.splitlines())))
            if 20 < len(answer) < 420:
                questions = PYTHON if kind in {"function", "method"} else PYTHON_CLASS
                facts.append(Fact(name, answer, tuple(questions), f"python:library/{path.name}"))
        title = re.match(r":mod:`!?~?([\w.]+)`\s+---?\s+(.+)", source) or re.search(
            r"^:mod:`!?~?([\w.]+)`\s+---?\s+(.+)$", source, re.MULTILINE
        )
        if title:
            name, about = title.groups()
            about = rst_text(about)
            facts.append(
                Fact(
                    name,
                    f"The `{name}` module of Python's standard library: {about}.",
                    tuple(MODULE),
                    f"python:library/{path.name}",
                )
            )
    return facts


def sql_facts(pages: dict[str, str]) -> list[Fact]:
    """What each SQL command of the PostgreSQL reference is for."""
    facts = []
    for page, text in pages.items():
        match = re.match(r"# ([A-Z ]+)\n\n\1 — (.+)\n", text)
        if match:
            name, about = match.groups()
            facts.append(Fact(name, f"In PostgreSQL, `{name}` is the command to {about}.", tuple(SQL), page))
    return facts


class Writer:
    """Writes conversations; ``random`` decides everything, so a seed fixes the text."""

    def __init__(self, entries: dict[str, Entry], synsets: dict[str, Synset], rng: random.Random) -> None:
        self.entries, self.synsets, self.rng = entries, synsets, rng

    def define(self, entry: Entry, senses: list[Synset]) -> Turn:
        first = senses[0]
        word, name = entry.word, f"'{entry.word}'"
        if first.instance:
            question = self.rng.choice(
                ["Who or what is {}?", "What is {}?", "Tell me about {}.", "What do you know about {}?"]
            )
            return question.format(word), f"{word}: {first.definition}."
        if first.pos == "noun" and self.rng.random() < 0.3:
            question = self.rng.choice(WHAT_IS).format(a=article(word))
        else:
            question = self.rng.choice(DEFINE).format(word)
        grammar = article(first.pos)
        answer = f"{name} is {grammar}. It means: {first.definition}."
        second = next((s for s in senses[1:] if s.pos != first.pos), senses[1] if len(senses) > 1 else None)
        if second is not None and self.rng.random() < 0.5:
            answer += f" As {article(second.pos)}, it can also mean: {second.definition}."
        return question, answer

    def synonym(self, entry: Entry, senses: list[Synset]) -> Turn | None:
        others = list(
            dict.fromkeys(w for s in senses[:2] for w in s.words if w.lower() != entry.word.lower())
        )[:3]
        if not others:
            return None
        quoted = [f"'{w}'" for w in others]
        if len(quoted) == 1:
            return self.rng.choice(SYNONYM).format(entry.word), f"A synonym of '{entry.word}' is {quoted[0]}."
        joined = ", ".join(quoted[:-1]) + " and " + quoted[-1]
        return self.rng.choice(SYNONYM).format(entry.word), f"Synonyms of '{entry.word}' are {joined}."

    def opposite(self, entry: Entry, senses: list[Synset]) -> Turn | None:
        for synset in senses:
            found = antonym(entry.word, synset, self.synsets)
            if found:
                return self.rng.choice(OPPOSITE).format(
                    entry.word
                ), f"The opposite of '{entry.word}' is '{found}'."
        return None

    def sentence(self, entry: Entry, senses: list[Synset]) -> Turn | None:
        for synset in senses[:4]:
            for example in synset.examples:
                if entry.word in example and example.count(" ") >= 2:
                    text = example[0].upper() + example[1:]
                    return self.rng.choice(SENTENCE).format(entry.word), text + (
                        "" if text[-1] in ".!?" else "."
                    )
        return None

    def kind(self, entry: Entry, senses: list[Synset]) -> Turn | None:
        first = senses[0]
        if first.pos != "noun" or not first.parents or first.instance:
            return None
        parent = self.synsets[first.parents[0]].words[0]
        return self.rng.choice(KIND).format(
            a=article(entry.word)
        ), f"{article(entry.word).capitalize()} is a kind of {parent}."

    def word_turns(self, entry: Entry, senses: list[Synset]) -> list[Turn]:
        """One to three exchanges about a word."""
        makers = [self.define, self.synonym, self.opposite, self.sentence, self.kind]
        made = [t for maker in makers if (t := maker(entry, senses)) is not None]
        first = made[0] if self.rng.random() < 0.55 else self.rng.choice(made)
        rest = [t for t in made if t is not first]
        self.rng.shuffle(rest)
        return [first, *rest[: self.rng.choice([0, 0, 1, 2])]]

    def fact_turn(self, fact: Fact) -> Turn:
        name = fact.name + ("()" if "function" in fact.questions[0] and self.rng.random() < 0.2 else "")
        return self.rng.choice(fact.questions).format(name), fact.answer

    def small_talk(self) -> Turn:
        questions, answers = self.rng.choice(SMALL_TALK)
        return self.rng.choice(questions), self.rng.choice(answers)

    def too_hard(self, word: str) -> Turn:
        return self.rng.choice(TOO_HARD).format(word), self.rng.choice(TOO_HARD_ANSWERS)

    def conversation(self, turns: list[Turn]) -> str:
        if self.rng.random() < 0.08:
            turns = [self.small_talk(), *turns]
        if self.rng.random() < 0.06:
            turns = [*turns, (self.rng.choice(THANKS), self.rng.choice(THANKS_ANSWERS))]
        elif self.rng.random() < 0.03:
            turns = [*turns, (self.rng.choice(FAREWELLS), self.rng.choice(FAREWELL_ANSWERS))]
        system = f"<|system|>{self.rng.choice(SYSTEM)}<|end|>" if self.rng.random() < 0.06 else ""
        return system + "".join(f"<|user|>{q}<|end|><|assistant|>{a}<|end|>" for q, a in turns)


def conversations(
    entries: dict[str, Entry], synsets: dict[str, Synset], facts: list[Fact], seed: int
) -> tuple[list[str], list[str]]:
    """Training and held-out conversations; common words come up more often than rare ones."""
    rng = random.Random(seed)
    writer = Writer(entries, synsets, rng)
    parts: tuple[list[str], list[str]] = ([], [])
    common = [e.word for e in entries.values() if e.count >= 20]
    for entry in entries.values():
        single = re.fullmatch(r"[A-Za-z][a-z]+( [A-Za-z]+)?", entry.word) is not None
        times = (
            6
            if entry.count >= 50
            else 4
            if entry.count >= 10
            else 2
            if entry.count >= 2
            else 1
            if single
            else 0
        )
        if entry.count == 0 and rng.random() > 0.15:
            continue
        first_held = held_out(entry.senses[0].key)
        senses = [s for s in entry.senses if held_out(s.key) == first_held]
        for _ in range(times):
            turns = writer.word_turns(entry, senses)
            if not first_held and rng.random() < 0.25:
                other = entries[rng.choice(common)]
                kept = [s for s in other.senses if not held_out(s.key)]
                if kept and not held_out(other.senses[0].key):
                    turns += writer.word_turns(other, kept)[:1]
            parts[first_held].append(writer.conversation(turns))
    for fact in facts:
        first_held = held_out(fact.page)
        for _ in range(1 if first_held else 4):
            parts[first_held].append(writer.conversation([writer.fact_turn(fact)]))
    for _ in range(1500):
        parts[0].append(writer.conversation([writer.small_talk()]))
    for _ in range(500):
        parts[0].append(writer.conversation([writer.too_hard(rng.choice(common))]))
    for part in parts:
        rng.shuffle(part)
    return parts


# Words that a first-time user is likely to try; the second stage repeats them.
LIKELY = [
    "abacus",
    "compass",
    "lantern",
    "violin",
    "river",
    "bridge",
    "happy",
    "sad",
    "big",
    "small",
    "fast",
    "slow",
    "hot",
    "cold",
    "warm",
    "good",
    "bad",
    "book",
    "house",
    "dog",
    "cat",
    "tree",
    "water",
    "computer",
    "program",
    "library",
    "memory",
    "language",
    "teacher",
    "school",
    "doctor",
    "music",
    "piano",
    "guitar",
    "mountain",
    "ocean",
    "island",
    "bread",
    "apple",
    "friend",
    "love",
    "war",
    "peace",
    "victory",
    "light",
    "dark",
    "begin",
    "end",
    "buy",
    "sell",
    "open",
    "close",
    "strong",
    "weak",
    "brave",
    "silence",
    "telescope",
    "microscope",
    "umbrella",
    "candle",
    "castle",
    "garden",
    "galaxy",
    "planet",
    "moon",
    "sun",
    "star",
    "rain",
    "snow",
    "wind",
    "fire",
    "earth",
]


def focused_conversations(
    entries: dict[str, Entry], synsets: dict[str, Synset], facts: list[Fact], seed: int
) -> tuple[list[str], list[str]]:
    """Conversations about common words alone, several about each: few enough that a tiny model can learn them."""
    rng = random.Random(seed + 1)
    writer = Writer(entries, synsets, rng)
    parts: tuple[list[str], list[str]] = ([], [])
    common = [
        e
        for e in entries.values()
        if e.word in LIKELY or (e.count >= 4 and re.fullmatch("[A-Za-z][a-z]{2,}", e.word))
    ]
    open_words = [e for e in common if not held_out(e.senses[0].key)]
    for entry in common:
        first_held = held_out(entry.senses[0].key)
        senses = [s for s in entry.senses if held_out(s.key) == first_held]
        times = 1 if first_held else 8 if entry.word in LIKELY else 4 if entry.count >= 10 else 2
        for index in range(times):
            turns = writer.word_turns(entry, senses)
            if index < (times + 1) // 2:
                turns = [writer.define(entry, senses), *[t for t in turns if "It means" not in t[1]][:1]]
            if not first_held and rng.random() < 0.3:
                other = rng.choice(open_words)
                turns += writer.word_turns(other, [s for s in other.senses if not held_out(s.key)])[:1]
            parts[first_held].append(writer.conversation(turns))
    for fact in facts:
        first_held = held_out(fact.page)
        for _ in range(1 if first_held or fact.name.count(".") > 1 else 3):
            parts[first_held].append(writer.conversation([writer.fact_turn(fact)]))
    for _ in range(400):
        parts[0].append(writer.conversation([writer.small_talk()]))
        parts[0].append(writer.conversation([writer.too_hard(rng.choice(open_words).word)]))
    for part in parts:
        rng.shuffle(part)
    return parts
