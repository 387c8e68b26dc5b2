"""Step times of the whole engine on this device, beside their floor, with dummy weights at real sizes.

    python benchmarks/engine_steps.py --device cuda --out benchmarks/results/engine-steps-h200.json

Before timing, each model's engine must give a batch of identical prompts one distinct greedy answer, the
same prompt's answer alone but for near ties: no number stands without it. The floor of a step is the bytes that it must
move, (weights + 2 * states of the batch) / measured copy rate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recurra import LLM, SamplingParams
from recurra.engine.engine import LLMEngine

MODELS: dict[str, dict[str, Any]] = {
    "mamba-130m": {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "state_size": 16,
        "num_hidden_layers": 24, "expand": 2, "conv_kernel": 4, "time_step_rank": 48, "vocab_size": 50280,
        "intermediate_size": 1536,
    },
    "mamba2-130m": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 768, "state_size": 128,
        "num_hidden_layers": 24, "expand": 2, "conv_kernel": 4, "num_heads": 24, "head_dim": 64,
        "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True,
    },
    "mamba2-2.7b": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 2560,
        "state_size": 128, "num_hidden_layers": 64, "expand": 2, "conv_kernel": 4, "num_heads": 80,
        "head_dim": 64, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True,
    },
    "codestral-7b": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 4096,
        "state_size": 128, "num_hidden_layers": 64, "expand": 2, "conv_kernel": 4, "num_heads": 128,
        "head_dim": 64, "n_groups": 8, "vocab_size": 32768, "tie_word_embeddings": False,
    },
}  # fmt: skip

#: Runs of steps; the median counts.
RUNS = 3


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy."""
    size = 4 << 30 if device.type == "cuda" else 1 << 30
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        sync(device)
        start = time.perf_counter()
        target.copy_(source)
        sync(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[1:])


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def gate(llm: LLM) -> dict[str, Any]:
    """Distinct greedy answers among 16 copies of a prompt: 1 is right. And the prompt alone against them.

    Other matrix kernels serve one row, which round their sums in another order: alone, the answer may go another
    way where the two likeliest tokens are closer to each other than that. How close they were is in the row.
    """
    prompt = {"prompt_token_ids": [(7 * i * i + 3) % 4000 + 10 for i in range(150)]}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2)
    answers = [a.outputs[0] for a in llm.generate([prompt] * 16, params, use_tqdm=False)]
    alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    found: dict[str, Any] = {"distinct_answers": len({tuple(a.token_ids) for a in answers})}
    pairs = zip(alone.token_ids, answers[0].token_ids, strict=True)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return found | {"alone": "equal"}
    assert alone.logprobs is not None
    scores = alone.logprobs[at]
    other = scores.get(answers[0].token_ids[at])
    gap = scores[alone.token_ids[at]].logprob - other.logprob if other else float("inf")
    return found | {"alone": f"other from token {at} on", "gap_there": round(gap, 4)}


#: Log-probability between two tokens that sums in another order of bfloat16 products may turn round.
NEAR_TIE = 0.05


def is_green(row: dict[str, Any]) -> bool:
    """The gate's verdict on a row."""
    return bool(row["distinct_answers"] == 1 and row.get("gap_there", 0.0) <= NEAR_TIE)


def decode_step(engine: LLMEngine, batch: int, steps: int, device: torch.device) -> float:
    """Milliseconds of a step that decodes ``batch`` sequences, sampling and scheduling included."""
    params = SamplingParams(temperature=0, max_tokens=RUNS * steps + 8, ignore_eos=True, detokenize=False)
    for i in range(batch):
        engine.add_request(f"b{i}", {"prompt_token_ids": [10 + i % 1000] * 16}, params)
    while engine.scheduler.num_waiting or engine.stats().generation_tokens < 2 * batch:
        engine.step()
    times = []
    for _ in range(RUNS):
        sync(device)
        start = time.perf_counter()
        for _ in range(steps):  # as many steps end in here as begin: the engine keeps one under way
            engine.step()
        sync(device)
        times.append((time.perf_counter() - start) / steps)
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_stats()
    return statistics.median(times) * 1e3


def prefill(engine: LLMEngine, count: int, length: int, device: torch.device) -> float:
    """Median milliseconds from queueing ``count`` prompts of ``length`` tokens to all first tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for attempt in range(4):
        for i in range(count):
            ids = [(i + attempt + 31 * t) % 4000 + 10 for t in range(length)]
            engine.add_request(f"p{i}", {"prompt_token_ids": ids}, params)
        sync(device)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def start_times(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds from starting a process to an engine that is ready, with an empty kernel cache and a full one."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        settings = f"folder, device={args.device!r}, dtype={args.dtype!r}, load_format='dummy', "
        program = (
            "import sys; from recurra import LLM; folder = sys.argv[1]; "
            f"llm = LLM({settings} skip_tokenizer_init=True, max_num_seqs={max(args.batches)}, "
            "max_num_batched_tokens=8192, enable_prefix_caching=False); llm.llm_engine.warm_up(); print('ready')"
        )
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "NUMBA_CACHE_DIR": f"{folder}/numba"}
        for kernels in ("cold", "cached"):
            start = time.perf_counter()
            command = [sys.executable, "-c", program, folder]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | caches
            ) as child:
                assert child.stdout is not None
                ready = any(line.strip() == "ready" for line in child.stdout)
                seconds = time.perf_counter() - start
            assert ready, f"{name} did not start"
            rows.append({"work": "start to ready", "shape": f"kernels {kernels}", "s": round(seconds, 1)})
    return rows


def measure(name: str, args: argparse.Namespace, rate: float, device: torch.device) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        llm = LLM(
            folder, device=args.device, dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True,
            max_num_seqs=max(args.batches), max_num_batched_tokens=8192, enable_prefix_caching=False,
        )  # fmt: skip
    engine = llm.llm_engine
    engine.warm_up()
    gated = gate(llm)
    engine.reset_stats()
    weights = sum(p.numel() * p.element_size() for p in engine.runner.model.parameters())
    state = engine.runner.pool.bytes_per_slot
    rows: list[dict[str, Any]] = []
    common = {"model": name, "dtype": args.dtype, "impl": "recurra"} | gated
    for batch in args.batches:
        ms = decode_step(engine, batch, args.steps, device)
        moved = weights + 2 * state * batch
        floor = moved / rate * 1e3
        rows.append(common | {
            "work": "decode", "shape": f"batch {batch}", "ms": round(ms, 3), "bytes": moved,
            "floor_ms": round(floor, 3), "times_floor": round(ms / floor, 2),
            "tokens_per_s": round(batch / ms * 1e3, 1),
        })  # fmt: skip
    for count, length in ((1, 2048), (1, 8192), (8, 1024)):
        ms = prefill(engine, count, length, device)
        rows.append(common | {
            "work": "prefill", "shape": f"{count} x {length}", "ms": round(ms, 2),
            "tokens_per_s": round(count * length / ms * 1e3),
        })  # fmt: skip
    del engine, llm
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows += [common | row for row in start_times(name, args)] if args.start else []
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--start", action="store_true", help="also measure starts, cold and cached")
    parser.add_argument("--commit", default="", help="commit to record, where git is not at hand")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if args.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu")
    args.device = device.type
    rate = copy_rate(device)
    print(f"copy rate {rate / 1e9:.0f} GB/s", flush=True)
    rows = [row for name in args.models for row in measure(name, args, rate, device)]
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    report = {
        "commit": args.commit or commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": name,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **triton_version()},
        "ceilings": {"copy_bytes_per_s": rate},
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not all(is_green(row) for row in rows):
        sys.exit("gate failed: identical prompts gave more than one answer; the times above don't count")


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


def triton_version() -> dict[str, str]:
    try:
        import triton
    except ImportError:
        return {}
    return {"triton": triton.__version__}


if __name__ == "__main__":
    main()
