"""The table of commands, and what happens when one fails."""

from __future__ import annotations

import sys
from typing import Any

from cyclopts import App, CycloptsError, Group

from recurra import __version__
from recurra.cli.failure import FAILED, INTERRUPTED, OK, USAGE, report, report_bug, report_usage
from recurra.errors import ConfigError, RecurraError, missing_dependency

_TEXT = Group("Text", sort_key=0)
_SERVICE = Group("Service", sort_key=1)
_MACHINE = Group("This machine", sort_key=2)
_COMMANDS = (
    ("generate", _TEXT, "Continue a prompt, given as --prompt, as a file or on stdin."),
    ("chat", _TEXT, "Talk with a model in the terminal."),
    ("complete", _TEXT, "Continue whatever you type, again and again."),
    ("run-batch", _TEXT, "Answer a file of requests in OpenAI's batch format."),
    ("serve", _SERVICE, "Serve a model over HTTP with OpenAI's API."),
    ("explain", _MACHINE, "Show which backend runs each operator, and why; with a model, what it costs."),
    ("collect-env", _MACHINE, "Show versions, device and settings, for bug reports."),
)

#: Commands of ``recurra bench``, and where each is.
_BENCHES = (
    ("latency", "bench_load:latency", "First tokens and decode steps of a batch, beside their floor."),
    ("throughput", "bench_load:throughput", "Tokens a second of many requests at once."),
    ("serve", "bench_load:serve", "A running server under requests that arrive at a rate."),
    ("prefix", "bench:prefix", "What kept states spare, on conversations like those that servers see."),
    (
        "kernels",
        "bench_kernels:kernels",
        "The operators: right to float64, and how near the machine's ceilings.",
    ),
)


def _bench() -> App:
    app = App(
        name="bench", help="Measure a model here, or a server.", help_format="plaintext", group=_MACHINE
    )
    for name, place, text in _BENCHES:
        app.command(f"recurra.cli.{place}", name=name, help=text)
    return app


def build_app() -> App:
    """The command tree; no command's module is imported yet."""
    app = App(
        name="recurra",
        version=__version__,
        help="Inference and serving for language models whose memory is a state.",
        help_epilogue="recurra COMMAND --help lists a command's options. --debug shows tracebacks.",
        help_format="plaintext",
    )
    for name, group, text in _COMMANDS:
        module = name.replace("-", "_")
        app.command(f"recurra.cli.{module}:{module}", name=name, group=group, help=text)
    app.command(_bench())
    return app


def run(argv: list[str]) -> int:
    """Run one command line and turn every ending into an exit code."""
    debug = "--debug" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    try:
        result: Any = build_app()(
            argv or ["--help"], exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        report_usage(error, [*(name for name, _, _ in _COMMANDS), "bench"])
        return USAGE
    except RecurraError as error:
        if debug:
            raise
        report(error)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if debug:
            raise
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, say) has left; the interpreter must not complain at exit.
        sys.stdout = None
        return OK
    except Exception as error:
        if debug:
            raise
        known = missing_dependency(error, "recurra") if isinstance(error, ModuleNotFoundError) else error
        if isinstance(known, RecurraError):
            report(known)
        else:
            report_bug(error)
        return FAILED
    return result if isinstance(result, int) else OK
