"""``recurra collect-env``: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from recurra import __version__
from recurra.cli.console import write
from recurra.cli.failure import OK
from recurra.cli.flags import switch

#: Packages whose version matters: needed ones, then those of the extras.
_PACKAGES = (
    "torch", "numpy", "numba", "llvmlite", "safetensors", "tokenizers", "jinja2", "pydantic", "cyclopts", "rich",
    "prompt-toolkit", "triton", "transformers", "fastapi", "uvicorn", "pyzmq", "msgspec", "prometheus-client",
)  # fmt: skip
_CPU_FLAGS = ("sse4_2", "f16c", "fma", "avx", "avx2", "avx512", "amx", "neon", "asimd", "bf16", "sve")


def collect_env(*, as_json: Annotated[bool, switch("--json")] = False) -> int:
    """Show versions, device and settings, for bug reports. Nothing secret is shown.

    Args:
        as_json: Print one JSON object.
    """
    facts = collect()
    write(json.dumps(facts, indent=2) + "\n" if as_json else _text(facts))
    return OK


def collect() -> dict[str, dict[str, Any]]:
    """Everything, section by section."""
    return {
        "recurra": _recurra(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": _device(),
        "cpu": _cpu(),
        "numba": _numba(),
        "environment": _environment(),
    }


def _recurra() -> dict[str, Any]:
    folder = Path(__file__).resolve().parents[1]
    return {
        "version": __version__,
        "commit": _commit(folder),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }


def _commit(folder: Path) -> str | None:
    """The checkout's commit, with a plus where it was changed since."""
    git = shutil.which("git")
    if git is None or not (folder.parents[1] / ".git").exists():
        return None
    command = [git, "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    from recurra.device import detect

    device = detect()
    facts: dict[str, Any] = {
        "chosen": device.type,
        "name": device.name,
        "threads": device.num_threads,
        "torch_cuda": torch.version.cuda,
        "triton_interpreter": device.triton_interpreter,
    }
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        facts[f"gpu{index}"] = f"{name}, compute {capability}, {free >> 20} of {total >> 20} MiB free"
    return facts


def _cpu() -> dict[str, Any]:
    import torch

    from recurra.device import available_cpus

    info = _proc("/proc/cpuinfo")
    flags = (info.get("flags") or info.get("Features") or "").split()
    memory = _proc("/proc/meminfo")
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "usable_cpus": available_cpus(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "flags": " ".join(flag for flag in flags if flag.startswith(_CPU_FLAGS)),
        "memory": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
    }


def _proc(path: str) -> dict[str, str]:
    """First value of each key of a ``key : value`` file; empty where the system has none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _numba() -> dict[str, Any]:
    try:
        import numba
    except ImportError:
        return {"installed": False}
    return {
        "threading_layers": numba.config.THREADING_LAYER_PRIORITY,
        "threads": numba.config.NUMBA_NUM_THREADS,
        "cache_dir": numba.config.CACHE_DIR or "__pycache__ beside the modules",
    }


def _environment() -> dict[str, Any]:
    from recurra.device import telling_environment

    return dict(telling_environment())


def _text(facts: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, entries in facts.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {_shown(value)}" for name, value in entries.items()] or ["  (none)"]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return "not there" if value is None else " ".join(value) if isinstance(value, list) else str(value)
