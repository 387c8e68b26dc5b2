"""Recurra against llama.cpp and transformers on this CPU, side by side in one run.

    bash benchmarks/peers.sh                                  # once
    python benchmarks/cpu_vs_peers.py --peers .venv-peers/bin/python

For each model and precision every implementation runs in a process of its own with the same number of
threads, all at hand at once, one working at a time, their repetitions interleaved; figures are medians.
llama.cpp is called through its C API (one llama_decode and one argmax a step), transformers through its
model classes, Recurra through ``recurra.LLM`` with its scheduler and sampler. No figure is kept unless
Recurra's greedy tokens are those of transformers in float32 on the same (rounded) weights.

The result file keeps the rows of other models and precisions from earlier calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PEERS = HERE / "peers"
sys.path.insert(0, str(PEERS))
from lines import PROMPT, make_prompt  # noqa: E402

MODELS = ("mamba-130m", "mamba2-130m")
GGUF = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: work, its size (sequences or tokens), decode steps
WORKS = (("decode", 1, 48), ("decode", 8, 12), ("decode", 32, 6), ("prefill", 512, 0), ("prefill", 2048, 0))
BRIEF_STEPS = 3
GATE_STEPS = 24
GATE_ERROR = 1e-2  # in log-probability


class Worker:
    """A process that answers lines of JSON."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=PEERS,
        )
        self.version = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args[1]} died with {self.process.wait()}")  # type: ignore[index]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()


@contextmanager
def started(command: list[str]) -> Iterator[Worker]:
    worker = Worker(command)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def prepare(model: str, precision: str, peers: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint and its GGUF file, written if they aren't there."""
    checkpoint, gguf = folder / model, folder / f"{model}-{GGUF[precision]}.gguf"
    if not (checkpoint / "config.json").exists():
        subprocess.run([sys.executable, PEERS / "checkpoints.py", model, checkpoint], check=True)
    if not gguf.exists():
        script = PEERS / "gguf_file.py"
        subprocess.run([peers, script, checkpoint, gguf, GGUF[precision]], check=True)
    return checkpoint, gguf


def ceilings(threads: int) -> dict[str, float]:
    """Memory read rate and the rate of float32 matrix products, measured now."""
    torch.set_num_threads(threads)
    memory, a, b = torch.ones(1 << 26), torch.randn(512, 768), torch.randn(3352, 768)

    def best(work: Any) -> float:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    read = memory.nbytes / best(memory.sum)
    product = 2 * 512 * 768 * 3352 / best(lambda: torch.nn.functional.linear(a, b))
    return {"read_gb_s": round(read / 1e9, 2), "fp32_product_gflop_s": round(product / 1e9, 1)}


def sizes(checkpoint: Path, precision: str) -> tuple[int, int, int]:
    """Parameters, bytes of the weights that a decode step reads, bytes of one sequence's states."""
    from safetensors import safe_open

    parameters = weights = 0
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            count = int(torch.tensor(shape).prod())
            parameters += count
            weights += count * (BYTES[precision] if len(shape) == 2 and "A_log" not in name else 4)
    config = json.loads((checkpoint / "config.json").read_text())
    inner = config["expand"] * config["hidden_size"]
    window = inner + (2 * config.get("n_groups", 0) * config["state_size"])
    state = (
        4
        * config["num_hidden_layers"]
        * (inner * config["state_size"] + window * (config["conv_kernel"] - 1))
    )
    return parameters, weights, state


def gate(ours: Worker, judge: Worker, vocab: int) -> float:
    """Recurra's greedy answers are the judge's; returns the largest error in log-probability."""
    worst = 0.0
    for seed, length in ((0, PROMPT), (1, 100)):
        prompt = make_prompt(seed, length, vocab)
        got = ours.ask("greedy", prompt=prompt, steps=GATE_STEPS)
        right = judge.ask("logprobs", prompt=prompt, tokens=got["tokens"])
        if got["tokens"] != right["best"]:
            raise SystemExit(f"gate: greedy tokens {got['tokens']} are not {right['best']}")
        worst = max(worst, *(abs(a - b) for a, b in zip(got["logprobs"], right["chosen"], strict=True)))
    for work, size, _ in WORKS:
        if (
            work == "prefill"
            and ours.ask(work, tokens=size)["tokens"] != judge.ask(work, tokens=size)["tokens"]
        ):
            raise SystemExit(f"gate: the token after a prompt of {size} differs")
    if worst > GATE_ERROR:
        raise SystemExit(f"gate: log-probabilities differ by {worst}")
    return worst


def measure(
    workers: dict[str, Worker], again: dict[str, list[str]], repetitions: int
) -> dict[tuple[str, int, str], Any]:
    """Seconds of every step or prompt by every implementation; a string where it died."""
    seconds: dict[tuple[str, int, str], Any] = {}
    for work, size, steps in WORKS:
        arguments = {"batch": size, "steps": steps} if work == "decode" else {"tokens": size}
        for repetition in range(repetitions + 1):  # the first warms up
            for name in list(workers):
                # transformers takes seconds where the others take a fraction: once, and few steps, are enough
                brief = name.startswith("transformers") and (work, size) != ("decode", 1)
                if brief and repetition != 1:
                    continue
                key = (work, size, name)
                if isinstance(seconds.get(key), str):
                    continue
                try:
                    few = {"steps": min(steps, BRIEF_STEPS)} if brief and steps else {}
                    answer = workers[name].ask(work, **{**arguments, **few})
                except (RuntimeError, BrokenPipeError) as error:
                    seconds[key] = f"died: {error}"
                    workers[name] = Worker(again[name])
                    continue
                if repetition:
                    unit = answer["seconds"] / ({**arguments, **few}.get("steps") or 1)
                    seconds.setdefault(key, []).append(unit)
    return seconds


def rows_of(
    seconds: dict[tuple[str, int, str], Any], model: str, precision: str, about: tuple[int, int, int],
    tops: dict[str, float], error: float,
) -> list[dict[str, Any]]:  # fmt: skip
    parameters, weights, state = about
    rows = []
    for (work, size, impl), times in seconds.items():
        row: dict[str, Any] = {"work": work, "shape": f"{model} x {size}", "model": model, "size": size,
                               "dtype": precision, "impl": impl.split(":")[0]}  # fmt: skip
        if isinstance(times, str):
            rows.append({**row, "failed": times})
            continue
        unit = statistics.median(times)
        tokens = size / unit
        moved = weights + 2 * state * size if work == "decode" else weights
        operations = 2 * parameters * size
        share = moved / unit / 1e9 / tops["read_gb_s"] if work == "decode" else (
            operations / unit / 1e9 / tops["fp32_product_gflop_s"])  # fmt: skip
        rows.append({
            **row, "us": round(unit * 1e6, 1), "tokens_per_s": round(tokens, 1), "bytes": moved,
            "ops": operations, "fraction_of_ceiling": round(share, 3),
            "spread": [round(min(times) / unit, 3), round(max(times) / unit, 3)], "runs": len(times),
            "error": error if impl == "recurra" else None,
        })  # fmt: skip
    return rows


def run_one(model: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """All implementations of one model at one precision."""
    checkpoint, gguf = prepare(model, precision, options.peers, options.work)
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    threads, python = str(options.threads), sys.executable
    hugging = [python, str(PEERS / "transformers_worker.py"), str(checkpoint)]
    judge = [*hugging, "float32", threads, *([] if precision == "float32" else [precision])]
    commands = {
        "recurra": [python, str(PEERS / "recurra_worker.py"), str(checkpoint), precision, threads],
        "llama.cpp": [options.peers, str(PEERS / "llama_worker.py"), str(gguf), threads],
    }
    if precision == "bfloat16":
        commands["transformers:bfloat16"] = [*hugging, "bfloat16", threads]
    with ExitStack() as stack:
        workers = {name: stack.enter_context(started(command)) for name, command in commands.items()}
        referee = stack.enter_context(started(judge))
        if precision == "float32":
            workers["transformers"] = referee
            commands["transformers"] = judge
        error = gate(workers["recurra"], referee, vocab)
        operators = workers["recurra"].ask("operators")
        tops = ceilings(options.threads)
        seconds = measure(workers, commands, options.repetitions)
        versions = {name.split(":")[0]: worker.version for name, worker in workers.items()}
        for worker in workers.values():
            worker.process.kill()
    rows = rows_of(seconds, model, precision, sizes(checkpoint, precision), tops, error)
    return {"rows": rows, "ceilings": tops, "versions": versions, "operators": operators}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recurra over each peer at the same precision, and batches over batch 1."""
    rate = {
        (r["model"], r["dtype"], r["work"], r["size"], r["impl"]): r["tokens_per_s"]
        for r in rows
        if "us" in r
    }
    out = []
    for (model, dtype, work, size, impl), own in rate.items():
        if impl != "recurra":
            continue
        found = {"model": model, "dtype": dtype, "work": work, "size": size}
        for peer in ("llama.cpp", "transformers"):
            if (model, dtype, work, size, peer) in rate:
                found[f"over {peer}"] = round(own / rate[model, dtype, work, size, peer], 2)
        if work == "decode" and size > 1:
            found["over batch 1"] = round(own / rate[model, dtype, work, 1, impl], 2)
        out.append(found)
    return out


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def plot(result: dict[str, Any], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in result["rows"] if "us" in r]
    impls = ("recurra", "llama.cpp", "transformers")
    figure, axes = pyplot.subplots(len(MODELS), len(WORKS), figsize=(16, 6), squeeze=False)
    for axis_row, model in zip(axes, MODELS, strict=True):
        for axis, (work, size, _) in zip(axis_row, WORKS, strict=True):
            for i, impl in enumerate(impls):
                bars = [
                    next((r["tokens_per_s"] for r in rows if (r["model"], r["work"], r["size"], r["dtype"], r["impl"])
                          == (model, work, size, dtype, impl)), 0) for dtype in GGUF
                ]  # fmt: skip
                axis.bar([x + 0.27 * (i - 1) for x in range(len(GGUF))], bars, 0.25, label=impl)
            axis.set_xticks(range(len(GGUF)), GGUF.values())
            axis.set_title(f"{model} {work} {size}", fontsize=9)
    axes[0][0].legend(fontsize=7)
    axes[0][0].set_ylabel("tokens/s")
    figure.suptitle(f"{result['machine']}, {result['threads']} threads")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python of benchmarks/peers.sh")
    parser.add_argument("--work", type=Path, default=Path("/tmp/recurra-peers"), help="checkpoints go here")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=list(GGUF), default=list(GGUF))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", default=cpu_name().replace("(R)", "").replace("(TM)", ""))
    options = parser.parse_args()
    options.peers = str(Path(options.peers).absolute())
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)

    name = "-".join(options.machine.lower().split())
    target = HERE / "results" / f"cpu-vs-peers-{name}.json"
    result: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {"rows": [], "runs": {}}
    for model in options.models:
        for precision in options.precisions:
            one = run_one(model, precision, options)
            kept = [r for r in result["rows"] if (r["model"], r["dtype"]) != (model, precision)]
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
            ).stdout.strip()
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            result["runs"][f"{model} {precision}"] = {
                "commit": commit, "date": now, "ceilings": one["ceilings"], "operators": one["operators"],
            }  # fmt: skip
            result |= {
                "commit": commit, "date": now, "machine": options.machine, "threads": options.threads,
                "versions": {**result.get("versions", {}), **one["versions"]}, "ceilings": one["ceilings"],
                "rows": kept + one["rows"],
            }  # fmt: skip
            result["ratios"] = ratios(result["rows"])
            target.write_text(json.dumps(result, indent=1) + "\n")
            for row in one["rows"]:
                print(
                    model,
                    precision,
                    row["work"],
                    row["size"],
                    row["impl"],
                    row.get("tokens_per_s", row.get("failed")),
                )
    for row in result["ratios"]:
        print(row)
    plot(result, target.with_suffix(".png"))


if __name__ == "__main__":
    main()
