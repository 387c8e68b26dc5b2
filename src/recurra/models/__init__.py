"""Models: from a checkpoint folder to something that maps a step's tokens to logits.

>>> config = read_config(Path("/models/mamba2-130m"))
>>> model = load_model(config, ops=ops, device=device, weight_dtype=config.torch_dtype, act_dtype=torch.float32)
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from recurra.errors import CheckpointError, ConfigError, UnknownArchitectureError
from recurra.layers.dtypes import Dtypes
from recurra.models.config import NAMES, Fields, Layout, ModelConfig, model_config, read_fields
from recurra.models.family import Build, CausalLM, Family
from recurra.models.files import WeightFiles, find_pickle, find_safetensors
from recurra.models.quant_files import QuantisedFiles
from recurra.models.quant_keep import keep_narrow
from recurra.models.weights import FLOATS, Entry, Map, Progress, draw, load
from recurra.ops import Ops

__all__ = [
    "ARCHITECTURES",
    "LOAD_FORMATS",
    "CausalLM",
    "ModelConfig",
    "load_model",
    "read_config",
    "skeleton",
]

log = logging.getLogger("recurra.models")

#: Architecture to the family that serves it, as ``module:name``; a module is imported when it is needed.
ARCHITECTURES = {
    "MambaForCausalLM": "recurra.models.mamba:MAMBA",
    "FalconMambaForCausalLM": "recurra.models.mamba:FALCON_MAMBA",
    "Mamba2ForCausalLM": "recurra.models.mamba2:MAMBA2",
    "MiniMaxForCausalLM": "recurra.models.minimax:MINIMAX",
    "RecurrentGemmaForCausalLM": "recurra.models.recurrent_gemma:RECURRENT_GEMMA",
    "Plamo2ForCausalLM": "recurra.models.plamo2:PLAMO2",
    "Phi4FlashForCausalLM": "recurra.models.phi4_flash:PHI4_FLASH",
    "BailingHybridForCausalLM": "recurra.models.bailing_hybrid:BAILING_HYBRID",
    "Lfm2ForCausalLM": "recurra.models.lfm2:LFM2",
    "Lfm2MoeForCausalLM": "recurra.models.lfm2:LFM2_MOE",
    "BambaForCausalLM": "recurra.models.bamba:BAMBA",
    "FalconH1ForCausalLM": "recurra.models.falcon_h1:FALCON_H1",
    "GraniteMoeHybridForCausalLM": "recurra.models.granite_moe_hybrid:GRANITE_MOE_HYBRID",
    "JambaForCausalLM": "recurra.models.jamba:JAMBA",
    "NemotronHForCausalLM": "recurra.models.nemotron_h:NEMOTRON_H",
    "NemotronHPuzzleForCausalLM": "recurra.models.nemotron_h:NEMOTRON_H",
    "KimiLinearForCausalLM": "recurra.models.kimi_linear:KIMI_LINEAR",
    "OlmoHybridForCausalLM": "recurra.models.olmo_hybrid:OLMO_HYBRID",
    "Qwen3_5ForCausalLM": "recurra.models.qwen3_5:QWEN3_5",
    "Qwen3_5ForConditionalGeneration": "recurra.models.qwen3_5:QWEN3_5",
    "Qwen3_5MoeForCausalLM": "recurra.models.qwen3_5:QWEN3_5_MOE",
    "Qwen3_5MoeForConditionalGeneration": "recurra.models.qwen3_5:QWEN3_5_MOE",
    "Qwen3NextForCausalLM": "recurra.models.qwen3_next:QWEN3_NEXT",
    "ZambaForCausalLM": "recurra.models.zamba:ZAMBA",
    "Zamba2ForCausalLM": "recurra.models.zamba2:ZAMBA2",
}

#: For configurations that name no architecture.
MODEL_TYPES = {
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "plamo2": "Plamo2ForCausalLM",
    "phi4flash": "Phi4FlashForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_puzzle": "NemotronHPuzzleForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}

#: What ``load_format`` may be: safetensors, random weights, or pickles (``pytorch_model.bin``).
LOAD_FORMATS = ("auto", "dummy", "pt")


def read_config(path: Path) -> ModelConfig:
    """Read a checkpoint folder's configuration; of the weights at most a header is read.

    Raises:
        CheckpointError: the folder or its configuration is missing, unreadable or asks for something
            that isn't supported; the message names file, key and value.
        UnknownArchitectureError: no model file serves it.
    """
    layout, fields = read_fields(path)
    architecture = _architecture(layout, fields)
    family = _family(architecture)
    if layout not in family.read:
        raise CheckpointError(f"{fields.file}: {architecture} doesn't come in the {layout.value} layout.")
    if family.section is not None:
        fields = fields.inside(family.section)
    fields = fields if family.adapt is None else family.adapt(fields)
    refused = NAMES[layout].unsupported.items()
    fields.only({key: values for key, values in refused if key not in family.handles})
    return model_config(
        layout,
        fields,
        architecture=architecture,
        tied_default=family.tied_default,
        torch_dtype=fields.number_format("dtype", "torch_dtype") or _stored_dtype(path, layout, family),
        residual_default=family.residual_in_fp32,
        sizes=family.read[layout](fields),
    )


def load_model(
    config: ModelConfig,
    *,
    ops: Ops,
    device: torch.device,
    weight_dtype: torch.dtype,
    act_dtype: torch.dtype,
    conv_dtype: torch.dtype | None = None,
    ssm_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """Build a model and fill it; each weight is allocated once, on ``device``, in its final format.

    Args:
        config: from :func:`read_config`.
        ops: the operators of ``device``.
        weight_dtype: of the matrices.
        act_dtype: of activations, norm weights, biases and filters: float32 on the CPU whatever the
            weights' dtype, the weights' dtype on a GPU, float64 for tests with the reference backend.
        conv_dtype: of the convolution windows in the state pool; None takes ``act_dtype``.
        ssm_dtype: of the recurrent states in the state pool.
        kv_dtype: of keys and values in the page pool; None takes ``act_dtype``.
        load_format: "auto" (safetensors), "dummy" (random weights; only the configuration is needed) or
            "pt" (``pytorch_model.bin``, a pickle, through torch's restricted loader).
        seed: of the dummy weights.
        progress: called with what is going on, bytes done and bytes in all.

    Raises:
        CheckpointError: weights are missing, damaged, or don't fit the configuration.
        ConfigError: an unknown ``load_format``.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", load_format, "unknown.", f"Valid: {', '.join(LOAD_FORMATS)}.")
    family = _family(config.architecture)
    files = None if load_format == "dummy" else _open_files(config, family, load_format)
    dtypes = Dtypes(
        weight_dtype, act_dtype, conv_dtype or act_dtype, ssm_dtype, config.residual_in_fp32, kv_dtype
    )
    model = family.build(config, Build(ops, dtypes, device))
    assert isinstance(model, nn.Module)
    entries = family.entries(config)
    if files is None:
        draw(model, entries, config.num_layers, seed, progress)
    else:
        tied = family.tied if config.tie_word_embeddings else None
        if isinstance(files, QuantisedFiles):
            entries = (*entries, *_kept(model, ops, entries, config.num_layers, files, act_dtype))
            log.warning("%s: %s; others become %s.", config.path, files.describe(), weight_dtype)
        load(model, entries, config.num_layers, files, tied, progress)
        files.close()
    return model.eval()


def skeleton(
    config: ModelConfig,
    *,
    ops: Ops,
    weight_dtype: torch.dtype,
    act_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> CausalLM:
    """The model without its weights, on the "meta" device: to count parameters and bytes."""
    dtypes = Dtypes(weight_dtype, act_dtype, conv_dtype, ssm_dtype, config.residual_in_fp32, kv_dtype)
    return _family(config.architecture).build(config, Build(ops, dtypes, torch.device("meta")))


def _architecture(layout: Layout, fields: Fields) -> str:
    """The architecture's name, from whatever the layout has to say about it."""
    if layout is Layout.MISTRAL:
        return "Mamba2ForCausalLM" if fields.raw.get("model_type", "mamba") == "mamba" else _unknown(fields)
    if layout is Layout.MAMBA_SSM:
        layer = str(fields.section("ssm_cfg").raw.get("layer", "Mamba1"))
        return {"Mamba1": "MambaForCausalLM", "Mamba2": "Mamba2ForCausalLM"}.get(layer) or _unknown(fields)
    names = fields.raw.get("architectures")
    if names:
        return str(names[0])
    return MODEL_TYPES.get(fields.raw.get("model_type", "")) or _unknown(fields)


def _unknown(fields: Fields) -> str:
    layer = fields.section("ssm_cfg").raw.get("layer")
    raise UnknownArchitectureError(str(layer or fields.raw.get("model_type")), list(ARCHITECTURES))


def _family(architecture: str) -> Family:
    if architecture not in ARCHITECTURES:
        raise UnknownArchitectureError(architecture, list(ARCHITECTURES))
    module, _, name = ARCHITECTURES[architecture].partition(":")
    family = getattr(import_module(module), name)
    assert isinstance(family, Family)
    return family


def _kept(
    model: CausalLM, ops: Ops, entries: Map, num_layers: int, files: QuantisedFiles, act: torch.dtype
) -> tuple[Entry, ...]:
    """Entries of the scales of weights that stay in 8 bits: none where the fused step takes wide weights alone."""
    if ops.build_decode_stack is not None and model.stack_weights() is not None:
        return ()
    assert isinstance(model, nn.Module)
    return keep_narrow(model, entries, num_layers, files, act)


def _open_files(config: ModelConfig, family: Family, load_format: str) -> WeightFiles:
    path = config.path
    if load_format == "pt":
        return WeightFiles(path, find_pickle(path), family.renames, family.skips)
    found = find_safetensors(path, config.layout)
    if config.quantisation is None:
        return WeightFiles(path, found, family.renames, family.skips)
    return QuantisedFiles(path, found, family.renames, family.skips, config.quantisation)


def _stored_dtype(path: Path, layout: Layout, family: Family) -> torch.dtype:
    """The embedding's format in a file's header, for configurations that don't say; float32 without files."""
    try:
        files = WeightFiles(path, find_safetensors(path, layout), family.renames, family.skips)
    except CheckpointError:
        return torch.float32  # loading complains, if it comes to that; dummy weights need no file
    stored = files.tensors.get(family.tied[1])
    files.close()
    return stored.dtype if stored is not None and stored.dtype in FLOATS else torch.float32
