"""Synthetic traffic for the prefix cache, as token ids: who asks what after what.

A trace is a list of calls. A call's prompt is put together from named pieces of tokens and from answers of
earlier calls, which are the model's own and known when the trace is replayed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: Token ids of pieces: what every vocabulary of use has.
FIRST_ID, LAST_ID = 16, 4095


@dataclass(frozen=True, slots=True)
class TraceCall:
    """One prompt: names of pieces, and ``answer:N`` for what call N answered.

    Attributes:
        conversation: whose it is.
        parts: in order.
        max_tokens: of the answer.
    """

    conversation: int
    parts: list[str]
    max_tokens: int


@dataclass(slots=True)
class Trace:
    """A day's traffic in small."""

    name: str
    pieces: dict[str, list[int]] = field(default_factory=dict)
    calls: list[TraceCall] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write ``NAME.json``."""
        text = json.dumps(asdict(self), separators=(",", ":"))
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what :meth:`save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["name"], data["pieces"], [TraceCall(**call) for call in data["calls"]])


@dataclass(slots=True)
class _Writer:
    """Draws pieces and lists calls."""

    trace: Trace
    draw: random.Random

    def piece(self, name: str, length: int) -> str:
        self.trace.pieces[name] = [self.draw.randint(FIRST_ID, LAST_ID) for _ in range(length)]
        return name

    def call(self, conversation: int, parts: list[str], max_tokens: int) -> str:
        self.trace.calls.append(TraceCall(conversation, list(parts), max_tokens))
        return f"answer:{len(self.trace.calls) - 1}"


def _chats(write: _Writer) -> None:
    """Twelve chats of eight turns, taking turns with each other; one short system prompt."""
    system = write.piece("system", 40)
    texts = {n: [system] for n in range(12)}
    for turn in range(8):
        for chat, text in texts.items():
            text.append(write.piece(f"u{chat}.{turn}", write.draw.randint(8, 60)))
            text.append(write.call(chat, text, write.draw.randint(12, 32)))


def _system_prompts(write: _Writer) -> None:
    """Two long system prompts, forty single questions to each, mixed."""
    systems = [write.piece(f"system{n}", 1500) for n in range(2)]
    order = [n for n in range(2) for _ in range(40)]
    write.draw.shuffle(order)
    for number, which in enumerate(order):
        question = write.piece(f"q{number}", write.draw.randint(8, 80))
        write.call(number, [systems[which], question], 8)


def _agents(write: _Writer) -> None:
    """Six tasks under one tool description; each step tries two tool calls and goes on with one of them."""
    tools = write.piece("tools", 600)
    for task in range(6):
        text = [tools, write.piece(f"task{task}", 80)]
        for step in range(4):
            text.append(write.call(task, text, 24))
            tried = [write.piece(f"result{task}.{step}.{n}", write.draw.randint(30, 150)) for n in range(2)]
            write.call(task, [*text, tried[0]], 16)
            text.append(tried[1])


def _documents(write: _Writer) -> None:
    """Two long documents, thirty questions to each, one after the other."""
    for document in range(2):
        text = write.piece(f"document{document}", 5000)
        for number in range(30):
            write.call(document, [text, write.piece(f"q{document}.{number}", write.draw.randint(8, 40))], 16)


KINDS: dict[str, Callable[[_Writer], None]] = {
    "chats": _chats, "system-prompts": _system_prompts, "agents": _agents, "documents": _documents,
}  # fmt: skip


def make_trace(kind: str, seed: int = 0) -> Trace:
    """A trace of one kind; the same seed makes the same trace."""
    trace = Trace(kind)
    KINDS[kind](_Writer(trace, random.Random(f"{kind} {seed}")))
    return trace


def write_all(folder: Path) -> None:
    """All kinds, as they are kept in the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        make_trace(kind).save(folder)
