"""What this machine can do. The only reader of ``os.environ`` in the package."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from functools import cache

import torch

from recurra.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A device and the capabilities that backends ask about.

    Attributes:
        type: "cpu" or "cuda".
        index: GPU number, 0 on the CPU.
        name: the product's name.
        capability: CUDA compute capability, (0, 0) on the CPU.
        num_threads: CPU threads that operators may use.
        has_triton: Triton is installed (it may still lack a GPU).
        triton_interpreter: Triton runs in its interpreter (``TRITON_INTERPRET=1``), for tests.
        has_numba: Numba is installed.
        has_flashinfer: FlashInfer is installed.
    """

    type: str
    index: int
    name: str
    capability: tuple[int, int]
    num_threads: int
    has_triton: bool
    triton_interpreter: bool
    has_numba: bool
    has_flashinfer: bool = False

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index) if self.type == "cuda" else torch.device("cpu")


def environment(name: str, default: str = "") -> str:
    """Read ``RECURRA_<name>``."""
    return os.environ.get(f"RECURRA_{name}", default)


#: Beginnings of the names that change how this program computes.
_TELLING = ("RECURRA_", "OMP_", "MKL_", "NUMBA_", "TORCH", "TRITON_", "CUDA_", "PYTORCH_", "TOKENIZERS_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def telling_environment() -> dict[str, str]:
    """Variables that a bug report should show; the values of what may be secret are left out."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)}
    return {
        name: "(set)" if any(word in name.replace("TOKENIZERS", "") for word in _SECRET) else value
        for name, value in found.items()
    }


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def available_cpus() -> int:
    """CPUs this process may run on (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads_asked() -> int:
    """``RECURRA_NUM_THREADS``; 0 where it isn't set."""
    text = environment("NUM_THREADS", "0")
    if re.fullmatch(r"[0-9]{1,4}", text) is None:
        raise ConfigError("RECURRA_NUM_THREADS", text, "not a number of threads.", "Use 1 or more.")
    return int(text)


def detect(device: str = "auto", num_threads: int | None = None) -> Device:
    """Describe the device to run on.

    Args:
        device: "auto" (a GPU if torch sees one), "cpu", "cuda" or "cuda:N".
        num_threads: CPU threads; None takes all that this process may use.

    Raises:
        ConfigError: an unknown device, CUDA asked for where torch sees no GPU, or no number of threads
            in the environment.
    """
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device) is None:
        raise ConfigError("device", device, "not a device.", 'Use "auto", "cpu", "cuda" or "cuda:0".')
    kind, _, number = device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device",
            device,
            "torch sees no CUDA GPU here.",
            'Use device="cpu" or install a CUDA torch.',
        )
    index = int(number or 0)
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ConfigError("device", device, f"there are {torch.cuda.device_count()} GPUs.", 'Use "cuda:0".')
    threads = num_threads or _threads_asked() or available_cpus()
    return Device(
        type=kind,
        index=index,
        name=torch.cuda.get_device_name(index) if kind == "cuda" else platform.processor() or "cpu",
        capability=torch.cuda.get_device_capability(index) if kind == "cuda" else (0, 0),
        num_threads=threads,
        has_triton=_installed("triton"),
        triton_interpreter=os.environ.get("TRITON_INTERPRET", "0") == "1",
        has_numba=_installed("numba"),
        has_flashinfer=_installed("flashinfer"),
    )
