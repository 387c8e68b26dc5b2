"""``recurra generate``: continue one prompt, or several at once."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from recurra.cli.console import note, write
from recurra.cli.failure import FAILED, INTERRUPTED, OK, error_line
from recurra.cli.flags import Model, Quiet, Sampling, engine_flags, sampling_flags, switch, takes
from recurra.cli.reading import from_stdin
from recurra.cli.running import (
    Speed,
    TextStream,
    answer,
    check_model_folder,
    ending,
    interruptible,
    open_engine,
    seeded,
)
from recurra.errors import ConfigError
from recurra.sampling_params import SamplingParams
from recurra.types import PromptInput, RequestOutput

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine


@takes(
    sampling=sampling_flags(("detokenize",), max_tokens=256, temperature=0.8),
    engine=engine_flags(("seed",)),
)
def generate(
    model: Model,
    *,
    prompt: Annotated[
        list[str] | None, Parameter(name=["--prompt", "-p"], allow_leading_hyphen=True, negative_iterable="")
    ] = None,
    prompt_file: Path | None = None,
    prompt_token_ids: str | None = None,
    echo: Annotated[bool, switch()] = False,
    as_json: Annotated[bool, switch("--json")] = False,
    quiet: Quiet = False,
    sampling: Sampling,
    engine: dict[str, Any],
) -> int:
    """Continue a prompt. The text streams to stdout, the speed goes to stderr.

    Without --prompt, --prompt-file or --prompt-token-ids the prompt is read from stdin.

    Args:
        prompt: Text to continue; give it again for more prompts, computed together.
        prompt_file: File whose content is the prompt; its last line break is dropped.
        prompt_token_ids: Token ids to continue, as 1,2,3; for models without a tokenizer.
        echo: Print the prompt before its continuation.
        as_json: Print one JSON object a prompt, with ids, logprobs and times, instead of text.
        quiet: No progress bars, no speed.
    """
    check_model_folder(model)  # before anybody types a prompt for nothing
    prompts = _prompts(prompt, prompt_file, prompt_token_ids)
    if not all(prompts):
        raise ConfigError("prompt", "", "it is empty.", "Give at least one character, or a token id.")
    seed = {name: value for name, value in sampling.given.items() if name == "seed" and value is not None}
    llm = open_engine(model, engine | seed, quiet)
    params = seeded(sampling.params(llm.sampling_defaults))
    if len(prompts) == 1 and params.n == 1 and not as_json:
        if echo and isinstance(prompts[0], str):
            write(prompts[0])
        outputs, stopped = _streamed(llm, prompts[0], params)
    else:
        outputs, stopped = _together(llm, prompts, params)
        for output in outputs:
            write(_json_line(output) if as_json else _plain(output, llm.tokenizer is None, echo))
    return _close(outputs, stopped, quiet or as_json)


def _prompts(texts: list[str] | None, file: Path | None, ids: str | None) -> list[PromptInput]:
    given = [name for name, value in (("--prompt", texts), ("--prompt-file", file), ("--prompt-token-ids", ids)) if value]  # fmt: skip
    if len(given) > 1:
        raise ConfigError("prompt", "", f"{' and '.join(given)} exclude each other.", "Give one of them.")
    if texts:
        return list(texts)
    if ids:
        return [_token_ids(ids)]
    if file is not None:
        try:
            return [_without_last_break(file.read_text(encoding="utf-8"))]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("prompt_file", str(file), f"can't be read ({error}).", "Give a UTF-8 text file.") from error  # fmt: skip
    if sys.stdin.isatty():
        note("Type the prompt, then Ctrl-D on a line of its own.")
    return [_without_last_break(from_stdin(sys.stdin.read))]


def _without_last_break(text: str) -> str:
    """``echo`` and editors end a file with a line break that nobody means to continue from."""
    return text.removesuffix("\n").removesuffix("\r")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(
            "prompt_token_ids", text, "not a list of integers.", "Write them as 1,2,3."
        ) from None


def _streamed(
    engine: LLMEngine, prompt: PromptInput, params: SamplingParams
) -> tuple[list[RequestOutput], bool]:
    output, stopped = answer(engine, prompt, params, write)
    write("\n")
    return [output], stopped


def _together(
    engine: LLMEngine, prompts: list[PromptInput], params: SamplingParams
) -> tuple[list[RequestOutput], bool]:
    """All prompts in one batch, in order."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    final: dict[str, RequestOutput] = {}
    stopped = False
    with interruptible() as interrupt:
        while engine.has_unfinished_requests():
            if interrupt.requested and not stopped:
                stopped = True
                engine.abort_request([str(index) for index in range(len(prompts))])
            final |= {output.request_id: output for output in engine.step()}
    return [final[str(index)] for index in range(len(prompts))], stopped


def _plain(output: RequestOutput, ids_only: bool, echo: bool) -> str:
    parts = []
    for answered in output.outputs:
        title = f"--- prompt {int(output.request_id) + 1}, answer {answered.index + 1} ---"
        begin = output.prompt if echo and output.prompt is not None else ""
        parts.append(f"{title}\n{begin}{TextStream(ids_only).new(answered)}\n")
    return "".join(parts)


def _json_line(output: RequestOutput) -> str:
    speed = Speed.of(output)
    record = dataclasses.asdict(output)
    record["metrics"] = dataclasses.asdict(speed) | {"tokens_per_second": speed.tokens_per_second}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _close(outputs: list[RequestOutput], stopped: bool, quiet: bool) -> int:
    """Say how fast it was and what failed."""
    errors = [
        a.error or "unknown" for output in outputs for a in output.outputs if a.finish_reason == "error"
    ]
    for error in errors:
        error_line(f"the answer ended early: {error}")
    if len(outputs) == 1:
        note(f"[{Speed.of(outputs[0])}{ending(outputs[0].outputs[0])}]", quiet)
    else:
        note(f"[{_batch_speed(outputs)}]", quiet)
    return INTERRUPTED if stopped else FAILED if errors else OK


def _batch_speed(outputs: list[RequestOutput]) -> str:
    tokens = sum(len(answered.token_ids) for output in outputs for answered in output.outputs)
    times = [output.metrics for output in outputs if output.metrics is not None]
    seconds = max((m.finished_time or 0.0) for m in times) - min(m.arrival_time for m in times)
    return f"{len(outputs)} prompts, {tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
