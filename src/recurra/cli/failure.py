"""One clear red line for everything that goes wrong, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from cyclopts import CycloptsError, MissingArgumentError, UnknownCommandError
from rich.text import Text

from recurra.cli.console import stderr
from recurra.errors import ConfigError, RecurraError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

#: Settings whose flag is not their own name with dashes.
RENAMED = {
    "backend": "--mamba-backend",
    "mamba backend": "--mamba-backend",
    "prefill_backend": "--mamba-prefill-backend",
    "ssu_algorithm": "--mamba-ssu-algorithm",
    "enable_stochastic_rounding": "--enable-mamba-cache-stochastic-rounding",
    "stochastic_rounding_philox_rounds": "--mamba-cache-philox-rounds",
    "api_keys": "--api-key",
    "model": "MODEL",
    "prompt": "--prompt",
}


def flag_name(setting: str) -> str:
    """The flag of a setting: ``max_num_seqs`` is ``--max-num-seqs``."""
    return RENAMED.get(setting, "--" + setting.replace("_", "-"))


def error_line(message: str) -> None:
    """Print ``error: message`` in red on stderr."""
    stderr().print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def report(error: RecurraError) -> None:
    """Say what went wrong in the words of the command line."""
    if isinstance(error, ConfigError):
        hint = f" {error.hint}" if error.hint else ""
        value = "" if error.value is None else f" {error.value}"
        error_line(f"{flag_name(error.setting)}{value}: {error.problem}{hint}")
    else:
        error_line(str(error))


def report_bug(error: Exception) -> None:
    """Say that something happened which nobody foresaw."""
    error_line(f"internal error: {type(error).__name__}: {error}")
    hint = "Please report it, with what --debug prints and the output of recurra collect-env."
    stderr().print(hint, style="dim", highlight=False, soft_wrap=True)


def report_usage(error: CycloptsError, commands: Sequence[str]) -> None:
    """Say what is wrong with the command line itself, and where its options are listed."""
    chain = [name for name in (error.command_chain or ()) if name]
    if not chain and isinstance(error, UnknownCommandError):
        # Its own text would import every command to look for aliases.
        error_line(_unknown_command(list(error.unused_tokens or ()), commands))
    elif isinstance(error, MissingArgumentError) and error.argument and error.argument.name == "--model":
        error_line("MODEL is missing: give a checkpoint folder.")
    else:
        error_line(" ".join(str(error).split()))
    command = " ".join(["recurra", *chain])
    stderr().print(f"Try: {command} --help", style="dim", highlight=False, soft_wrap=True)


def _unknown_command(tokens: list[str], commands: Sequence[str]) -> str:
    given = tokens[0] if tokens else ""
    near = difflib.get_close_matches(given, commands, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else f"There are: {', '.join(commands)}."
    return f'unknown command "{given}". {hint}'
