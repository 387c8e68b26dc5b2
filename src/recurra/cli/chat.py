"""``recurra chat``: talk with a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recurra.cli.console import note, write
from recurra.cli.conversation import COMMANDS, Conversation, interpret
from recurra.cli.failure import OK, error_line
from recurra.cli.flags import Model, Quiet, Sampling, engine_flags, sampling_flags, takes
from recurra.cli.reading import each_text, open_reader
from recurra.cli.running import Speed, answer, ending, open_engine, seeded
from recurra.cli.session_file import SessionFile
from recurra.errors import ConfigError, RequestError
from recurra.sampling_params import SamplingParams

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine


@takes(
    sampling=sampling_flags(
        ("n", "detokenize", "logprobs", "prompt_logprobs"), max_tokens=1024, temperature=0.8
    ),
    engine=engine_flags(("seed", "skip_tokenizer_init")),
)
def chat(
    model: Model,
    *,
    system: str | None = None,
    session: str | None = None,
    quiet: Quiet = False,
    sampling: Sampling,
    engine: dict[str, Any],
) -> int:
    """Talk with a model. /help inside lists what you can do.

    Args:
        system: System message that opens the conversation.
        session: Name (or path) under which the conversation is kept and gone on with, state and all.
        quiet: No progress bars, no speeds.
    """
    files = None if session is None else SessionFile.named(session)
    llm = open_engine(model, engine, quiet)
    _require_template(llm, model)
    conversation = Conversation(model, system)
    if files is not None:
        files.resume(llm, conversation, quiet)
    talk = Talk(llm, conversation, sampling.params(llm.sampling_defaults), quiet, files)
    if sys.stdin.isatty() and not quiet:
        note(f"{model}, {llm.model_config.architecture}. /help lists commands, Ctrl-D leaves.")
    each_text(open_reader("> ", list(COMMANDS)), talk.turn)
    return OK


def _require_template(engine: LLMEngine, model: str) -> None:
    if engine.tokenizer is None:
        raise ConfigError("model", model, "it has no tokenizer, so there is no text to chat in.", "Use recurra generate --prompt-token-ids.")  # fmt: skip
    if engine.tokenizer.chat_template is None:
        raise ConfigError(
            "chat_template", None, "this model brings no chat template.",
            "Give one, a Jinja file or text; or use recurra complete for plain continuation.",
        )  # fmt: skip


@dataclass(slots=True)
class Talk:
    """One conversation with one engine."""

    engine: LLMEngine
    conversation: Conversation
    params: SamplingParams
    quiet: bool
    files: SessionFile | None = None

    def turn(self, text: str) -> bool:
        """Handle what the user typed; False ends the talk."""
        outcome = interpret(self.conversation, text)
        if outcome.say:
            note(outcome.say)
        if outcome.ask is not None:
            self._ask(outcome.ask)
        return not outcome.leave

    def _ask(self, question: str) -> None:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "checked before the talk began"
        self.conversation.ask(question)
        params = seeded(self.params)
        try:
            prompt = tokenizer.chat(self.conversation.messages)
            output, _ = answer(self.engine, prompt, params, write)
        except RequestError as error:
            self.conversation.take_back()
            error_line(str(error))
            return
        write("\n")
        said = output.outputs[0]
        if said.finish_reason == "error":
            error_line(f"the answer ended early: {said.error}")
        self.conversation.answer(said.text)
        if self.files is not None and said.finish_reason != "error":
            self.files.keep(self.engine, self.conversation, output)
        note(f"[{Speed.of(output)}{ending(said)}]", self.quiet)
