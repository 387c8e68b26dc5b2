"""Recurra: inference and serving for language models whose memory is a state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "recurra.engine.llm",
    "LLMEngine": "recurra.engine.engine",
    "MambaBackendEnum": "recurra.config.mamba",
    "MambaConfig": "recurra.config.mamba",
    "RequestOutput": "recurra.types",
    "CompletionOutput": "recurra.types",
    "Logprob": "recurra.types",
    "SamplingParams": "recurra.sampling_params",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "LLMEngine",
    "Logprob",
    "MambaBackendEnum",
    "MambaConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from recurra.config.mamba import MambaBackendEnum, MambaConfig
    from recurra.engine.engine import LLMEngine
    from recurra.engine.llm import LLM
    from recurra.sampling_params import SamplingParams
    from recurra.types import CompletionOutput, Logprob, RequestOutput


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'recurra' has no attribute {name!r}")
