"""transformers' models as oracles: plain formulas, no cache, and mended where a release is known to be wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _GroupedNorm(nn.Module):
    """Mamba-2's gated norm over each group. transformers up to 5.17 at least normalises over all groups at once in
    Mamba-2, Bamba and Granite 4; by 5.24 it is mended."""

    def __init__(self, weight: Tensor, eps: float, group_size: int) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = weight, eps, group_size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(-2).to(x.dtype)


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint folder, on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    for package in ("mamba_ssm", "causal_conv1d", "kernels"):
        assert importlib.util.find_spec(package) is None, (
            f"{package} would replace the formulas compared with"
        )
    # It logs, once a kernel, that it runs the plain formulas: what is wanted here.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Experts one after the other: the grouped product takes no odd widths.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    _mend_gated_norms(model)
    return model


def _mend_gated_norms(model: Any) -> None:
    """Norm by group where a release normalises all groups at once."""
    key = {"mamba2": "n_groups", "bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups"}
    groups = getattr(model.config, key.get(model.config.model_type, ""), 1)
    if groups == 1:
        return
    for module in model.modules():
        norm = getattr(module, "norm", None)
        if type(norm).__name__.endswith("RMSNormGated") and not hasattr(norm, "group_size"):
            module.norm = _GroupedNorm(norm.weight, norm.variance_epsilon, norm.weight.shape[0] // groups)
