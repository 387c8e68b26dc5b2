"""An engine for a command, and one answer at a time from it."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from recurra.cli.console import note, progress, stderr
from recurra.errors import ConfigError
from recurra.sampling_params import SamplingParams
from recurra.types import CompletionOutput, PromptInput, RequestOutput

if TYPE_CHECKING:
    from recurra.config.engine import EngineConfig
    from recurra.engine.engine import LLMEngine


def check_model_folder(model: str) -> Path:
    """The checkpoint's folder.

    Raises:
        ConfigError: there is none; with the nearest name, or how to get a checkpoint.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError("model", model, "a file, not a checkpoint folder.", f"Give {path.parent} instead.")
    siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    if near:
        hint = f"Did you mean {path.parent / near[0]}?"
    elif model.count("/") == 1 and not path.parent.is_dir():
        hint = f"Models are read from local folders: hf download {model} --local-dir {path.name}"
    else:
        hint = "Give a checkpoint folder: config.json, *.safetensors and tokenizer.json."
    raise ConfigError("model", model, "no such folder.", hint)


class _Warnings(logging.Handler):
    """Warnings of the engine as yellow lines."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr().print(
            f"{record.levelname.lower()}: {record.getMessage()}",
            style="yellow", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def show_warnings(quiet: bool) -> None:
    """Let what the engine has to say reach the user."""
    log = logging.getLogger("recurra")
    if not any(isinstance(handler, _Warnings) for handler in log.handlers):
        log.addHandler(_Warnings())
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.WARNING)


def engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """Settings of the engine for ``model``.

    Raises:
        ConfigError: no such folder, or a setting that can't work.
    """
    from recurra.config.engine import EngineConfig

    return EngineConfig(model=str(check_model_folder(model)), **settings)


def open_engine(model: str, settings: dict[str, Any], quiet: bool) -> LLMEngine:
    """Load a model and warm it up, with progress bars.

    Raises:
        RecurraError: whatever is wrong with the settings or the checkpoint.
    """
    show_warnings(quiet)
    config = engine_config(model, settings)
    with progress(quiet) as report:
        report("starting", 0, 0)
        from recurra.engine.engine import LLMEngine
        from recurra.engine.generation import shown

        engine = LLMEngine(config, progress=report)
        engine.warm_up(report)
    if engine.sampling_defaults:
        note(f"[defaults of the model: {shown(engine.sampling_defaults)}]", quiet)
    return engine


def seeded(params: SamplingParams) -> SamplingParams:
    """A seed for parameters that bring none: each answer of a command is a new one."""
    if params.seed is not None or params.greedy:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(31))


@dataclass(slots=True)
class Interrupt:
    """Ctrl-C while the engine works: the first asks to stop, the second ends the program."""

    requested: bool = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch Ctrl-C between steps; an exception inside a step would leave states nobody can trust."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt._handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class _Shown:
    """How much of an answer went to the screen."""

    text: int = 0
    tokens: int = 0


@dataclass(slots=True)
class TextStream:
    """New text of answers, or their token ids where the model has no tokenizer."""

    ids_only: bool
    _shown: dict[int, _Shown] = field(default_factory=dict)

    def new(self, answer: CompletionOutput) -> str:
        """What ``answer`` has beyond what was asked for before."""
        shown = self._shown.setdefault(answer.index, _Shown())
        if self.ids_only:
            tokens = answer.tokens_after(shown.tokens)
            news = "".join(f"{token} " for token in tokens)
            shown.tokens += len(tokens)
        else:
            news = answer.text[shown.text :]
            shown.text = len(answer.text)
        return news


def answer(
    engine: LLMEngine,
    prompt: PromptInput,
    params: SamplingParams,
    show: Callable[[str], None],
    request_id: str = "cli",
) -> tuple[RequestOutput, bool]:
    """Continue one prompt, showing the first answer's text as it comes.

    Returns:
        the final output, and whether Ctrl-C ended it.

    Raises:
        RequestError: the prompt or the parameters can't be served.
    """
    engine.add_request(request_id, prompt, params)
    stream = TextStream(engine.tokenizer is None)
    final: RequestOutput | None = None
    aborted = False
    with interruptible() as interrupt:
        while engine.has_unfinished_requests():
            if interrupt.requested and not aborted:
                aborted = True
                engine.abort_request([request_id])
            for output in engine.step():
                final = output
                show(stream.new(output.outputs[0]))
    assert final is not None, "a request ends with an output"
    return final, aborted


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a request was answered.

    Attributes:
        prompt_tokens, answer_tokens: counts, all answers together.
        first_token_s: seconds to the first token.
        answer_s: seconds from the first token to the last.
    """

    prompt_tokens: int
    answer_tokens: int
    first_token_s: float
    answer_s: float

    @classmethod
    def of(cls, output: RequestOutput) -> Speed:
        metrics = output.metrics
        start = metrics.arrival_time if metrics else 0.0
        first = (metrics.first_token_time if metrics else None) or start
        end = (metrics.finished_time if metrics else None) or first
        tokens = sum(len(a.token_ids) for a in output.outputs)
        return cls(len(output.prompt_token_ids), tokens, first - start, end - first)

    @property
    def tokens_per_second(self) -> float:
        """Of the answer, without the prompt's time."""
        after_first = self.answer_tokens - 1
        return after_first / self.answer_s if after_first > 0 and self.answer_s > 0 else 0.0

    def __str__(self) -> str:
        rate = f", {self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else ""
        return (
            f"prompt {self.prompt_tokens} tokens, first token after {self.first_token_s:.2f} s; "
            f"answer {self.answer_tokens} tokens{rate}"
        )


def ending(answered: CompletionOutput) -> str:
    """Why an answer ended, in words; nothing where the model ended it itself."""
    if answered.finish_reason == "length":
        return "; ended by --max-tokens"
    if answered.finish_reason == "abort":
        return "; stopped"
    if answered.stop_reason is not None:
        return f"; stopped at {answered.stop_reason!r}"
    return ""
