"""``recurra bench latency``, ``throughput`` and ``serve``: how fast a model answers, and a server under load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recurra.cli.console import note, write
from recurra.cli.failure import FAILED, OK
from recurra.cli.flags import Model, Quiet, engine_flags, takes
from recurra.errors import ConfigError

if TYPE_CHECKING:
    from recurra.bench.times import Timed
    from recurra.bench.workload import Workload

_SET_HERE = ("skip_tokenizer_init",)


@takes(engine=engine_flags((*_SET_HERE, "enable_prefix_caching")))
def latency(
    model: Model,
    *,
    batch: list[int] | None = None,
    input_len: int = 128,
    output_len: int = 32,
    roofline: bool = False,
    output: Path | None = None,
    quiet: Quiet = False,
    engine: dict[str, Any],
) -> int:
    """Measure first tokens and decode steps of equal requests that start together.

    Args:
        batch: Requests at once; give it again for more sizes. Without it: 1, 8.
        input_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        roofline: Put the least time beside it that weights and states need at this device's copy rate.
        output: Write the figures there (JSON), and a plot beside them (PNG).
        quiet: No progress.
    """
    from recurra.bench.engine_runs import Roofline, latency
    from recurra.bench.plots import plot_latency
    from recurra.bench.times import lines, record, save
    from recurra.cli.running import open_engine

    sizes = batch or [1, 8]
    _positive(batch=min(sizes), input_len=input_len, output_len=output_len)
    given = {**engine, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    running = open_engine(model, given, quiet)
    most = running.limits.max_num_seqs
    if max(sizes) > most:
        raise ConfigError("--batch", max(sizes), f"{most} sequences run at once.", "Raise --max-num-seqs.")
    roof = Roofline.measure(running) if roofline else None
    rows = []
    for size in sizes:
        row = latency(running, size, input_len, output_len)
        rows.append(row if roof is None else roof.beside(row))
        write(lines(rows[-1]) + "\n\n")
    if output is not None:
        found = record(Path(model).name, _machine(running.runner.device), rows)
        save(output, found | ({} if roof is None else {"ceilings": {"copy_bytes_per_s": roof.copy_rate}}))
        plot_latency(output.with_suffix(".png"), rows)
    return OK


@takes(engine=engine_flags(_SET_HERE))
def throughput(
    model: Model,
    *,
    requests: int = 64,
    mix: Literal["fixed", "chat"] = "fixed",
    input_len: int = 128,
    output_len: int = 128,
    shared_prefix: int = 0,
    output: Path | None = None,
    quiet: Quiet = False,
    engine: dict[str, Any],
) -> int:
    """Measure tokens a second of many requests that are all there from the start.

    Args:
        requests: How many.
        mix: "fixed" lengths, or "chat": widely varying ones, as in people's talks with assistants.
        input_len: Tokens of a prompt, in the fixed mix.
        output_len: Tokens of an answer, in the fixed mix.
        shared_prefix: Tokens that all prompts begin with.
        output: Write the figures there (JSON), and a plot beside them (PNG).
        quiet: No progress.
    """
    from recurra.bench.engine_runs import throughput
    from recurra.bench.power import PowerMeter
    from recurra.bench.workload import Workload
    from recurra.cli.running import open_engine

    _positive(requests=requests, input_len=input_len, output_len=output_len)
    running = open_engine(model, {**engine, "skip_tokenizer_init": True}, quiet)
    load = Workload(
        requests, mix, input_len, output_len, shared_prefix, vocab_size=running.runner.model.vocab_size
    )
    device = running.runner.device
    with PowerMeter(device.index or 0 if device.type == "cuda" else None) as meter:
        timed = throughput(running, load.calls())
    extra = {} if meter.watts is None else {"watts": meter.watts}
    return _report(load, timed, extra, Path(model).name, _machine(device), output)


def serve(
    *,
    url: str = "http://127.0.0.1:8000",
    served_model: str | None = None,
    requests: int = 64,
    rate: float = math.inf,
    arrivals: Literal["poisson", "fixed"] = "poisson",
    mix: Literal["fixed", "chat"] = "fixed",
    input_len: int = 128,
    output_len: int = 128,
    shared_prefix: int = 0,
    timeout: float = 600.0,
    seed: int = 0,
    output: Path | None = None,
    quiet: Quiet = False,
) -> int:
    """Measure a running server: requests arrive at a rate, whether or not earlier ones are answered.

    Args:
        url: The server's address.
        served_model: Its model's name; without it, the first that it lists.
        requests: How many.
        rate: Requests a second; without it all come at once.
        arrivals: "poisson": gaps are random, as between callers that know nothing of each other; or "fixed".
        mix: "fixed" lengths, or "chat": widely varying ones, as in people's talks with assistants.
        input_len: Tokens of a prompt, in the fixed mix.
        output_len: Tokens of an answer, in the fixed mix.
        shared_prefix: Tokens that all prompts begin with.
        timeout: Seconds without a token after which an answer counts as failed.
        seed: Of the draws.
        output: Write the figures there (JSON), and a plot beside them (PNG).
        quiet: No progress.
    """
    import asyncio

    from recurra.bench.workload import Workload

    _positive(requests=requests, input_len=input_len, output_len=output_len)
    if not rate > 0:
        raise ConfigError("--rate", rate, "not a number of requests a second.", "Use more than 0.")
    load = Workload(
        requests, mix, input_len, output_len, shared_prefix, rate, arrivals == "poisson", seed=seed
    )
    name, timed = asyncio.run(_against(url, served_model, load, timeout, quiet))
    return _report(load, timed, {"rate": rate if math.isfinite(rate) else "all at once"}, name, url, output)


async def _against(
    url: str, model: str | None, load: Workload, timeout: float, quiet: bool
) -> tuple[str, list[Timed]]:
    import httpx

    from recurra.bench.serve import first_model, serve_calls

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        try:
            name = model or await first_model(client)
        except httpx.HTTPError as error:
            raise ConfigError("--url", url, f"no answer: {error}.", "Start one with recurra serve.") from None
        note(f"[{load.count} requests to {name}]", quiet)
        return name, await serve_calls(client, name, load.calls())


def _report(
    load: Workload, timed: list[Timed], extra: dict[str, Any], model: str, machine: str, output: Path | None
) -> int:
    from recurra.bench.plots import plot_requests
    from recurra.bench.times import lines, record, save, summary

    shape = {"mix": load.mix, "shared_prefix": load.shared_prefix}
    if load.mix == "fixed":
        shape |= {"input_tokens": load.input_len, "output_tokens": load.output_len}
    row = shape | extra | summary(timed)
    write(lines(row) + "\n")
    for error in dict.fromkeys(r.error for r in timed if r.error):
        note(f"failed: {error}", False)
    if output is not None:
        save(output, record(model, machine, [row]))
        plot_requests(output.with_suffix(".png"), timed)
    return FAILED if row["failed"] else OK


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "too few.", "Use 1 or more.")


def _machine(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
