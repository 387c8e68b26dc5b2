"""``recurra complete``: continue whatever is typed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recurra.cli.console import note, write
from recurra.cli.failure import OK, error_line
from recurra.cli.flags import Model, Quiet, Sampling, engine_flags, sampling_flags, takes
from recurra.cli.reading import each_text, open_reader
from recurra.cli.running import Speed, answer, ending, open_engine, seeded
from recurra.errors import ConfigError, RequestError
from recurra.sampling_params import SamplingParams

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine


@takes(
    sampling=sampling_flags(
        ("n", "detokenize", "logprobs", "prompt_logprobs"), max_tokens=128, temperature=0.8
    ),
    engine=engine_flags(("seed", "skip_tokenizer_init")),
)
def complete(model: Model, *, quiet: Quiet = False, sampling: Sampling, engine: dict[str, Any]) -> int:
    """Continue whatever you type; an empty line goes on from where the model stopped.

    Args:
        quiet: No progress bars, no speeds.
    """
    llm = open_engine(model, engine, quiet)
    if llm.tokenizer is None:
        raise ConfigError("model", model, "it has no tokenizer, so there is no text to continue.", "Use recurra generate --prompt-token-ids.")  # fmt: skip
    if sys.stdin.isatty() and not quiet:
        note(
            f"{model}, {llm.model_config.architecture}. Type a beginning; an empty line goes on. Ctrl-D leaves."
        )
    params = sampling.params(llm.sampling_defaults)
    each_text(open_reader("> "), Continuation(llm, params, quiet).turn)
    return OK


@dataclass(slots=True)
class Continuation:
    """The text that grows, typed and generated."""

    engine: LLMEngine
    params: SamplingParams
    quiet: bool
    text: str = ""

    def turn(self, typed: str) -> bool:
        """Start from a new beginning, or go on; False ends."""
        if typed.strip() in ("/exit", "/quit"):
            return False
        beginning = typed or self.text
        if not beginning:
            note("Type the beginning of a text.", self.quiet)
            return True
        params = seeded(self.params)
        try:
            if typed:
                write(typed)
            output, _ = answer(self.engine, beginning, params, write)
        except RequestError as error:
            error_line(str(error))
            return True
        write("\n")
        said = output.outputs[0]
        if said.finish_reason == "error":
            error_line(f"the answer ended early: {said.error}")
        self.text = beginning + said.text
        note(f"[{Speed.of(output)}{ending(said)}]", self.quiet)
        return True
