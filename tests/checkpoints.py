"""Tiny random checkpoints, written by transformers' own classes, in every layout that Recurra loads.

The weights are drawn so that the carried state matters: slow decay (``A_log`` = -4), steps from
``dt_bias`` in U(-4, -1), convolution weights 30 times the usual, and logits spread until a greedy choice is
clear of rounding. With ordinary random weights, forgetting the state altogether passes at a tolerance
of 1e-4.

>>> folder = write_mamba2(tmp_path / "model", n_groups=2)
>>> folder = write_mamba2(tmp_path / "shards", shards=3, tokenizer=True)
>>> write_mamba_ssm(folder, tmp_path / "original")
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCABULARY = 320
#: Scale of the final norm's weight: logits have a spread of several units.
_LOGIT_SCALE = 6.0
_TEXT = (
    "A state space model reads a sentence once and keeps what matters in a small state. ",
    "The quick brown fox jumps over the lazy dog; the dog sleeps on, and nothing is forgotten. ",
    "Numbers such as 3, 14, 159 and 2653 follow, then naïve café words and a line of 漢字. ",
)
END_OF_TEXT = "<|endoftext|>"


def write_mamba(folder: Path, **overrides: Any) -> Path:
    """A Mamba checkpoint in transformers' layout; see :func:`write_any` for the options."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 40, "state_size": 11, "num_hidden_layers": 3, "time_step_rank": 5}
    return write_any(folder, MambaConfig, MambaForCausalLM, sizes | {"eos_token_id": 0}, overrides)


def write_falcon_mamba(folder: Path, **overrides: Any) -> Path:
    """A FalconMamba checkpoint: Mamba with weight-less norms on B, C and dt."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    sizes = {"hidden_size": 40, "state_size": 11, "num_hidden_layers": 3, "time_step_rank": 5}
    return write_any(
        folder, FalconMambaConfig, FalconMambaForCausalLM, sizes | {"eos_token_id": 0}, overrides
    )


def write_mamba2(folder: Path, **overrides: Any) -> Path:
    """A Mamba-2 checkpoint in transformers' layout; head dim and state size are no powers of two."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {
        "hidden_size": 48, "num_heads": 8, "head_dim": 12, "n_groups": 1, "state_size": 20,
        "num_hidden_layers": 3, "chunk_size": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return write_any(folder, Mamba2Config, Mamba2ForCausalLM, sizes, overrides)


def write_any(
    folder: Path,
    config_class: Any,
    model_class: Any,
    sizes: dict[str, Any],
    overrides: dict[str, Any],
) -> Path:
    """Draw the weights and save.

    ``overrides`` go to the configuration, but for these:

        seed: of the weights.
        dtype: of the saved weights.
        shards: save as this many files and an index.
        tokenizer: also write tokenizer.json and tokenizer_config.json.
    """
    options = dict(overrides)
    seed, dtype = options.pop("seed", 0), options.pop("dtype", torch.float32)
    shards, with_tokenizer = options.pop("shards", 1), options.pop("tokenizer", False)
    config = config_class(**({"vocab_size": VOCABULARY} | sizes | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        make_state_matter(model)
    model.to(dtype)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=nbytes if shards == 1 else -(-nbytes // shards))
    if with_tokenizer:
        write_tokenizer(folder, config.vocab_size)
    return folder


@torch.no_grad()
def make_state_matter(model: nn.Module) -> None:
    """Redraw the weights of a pure stack that decide how much an answer depends on the carried state."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(-4.0)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.uniform_(-4.0, -1.0)
        elif name.endswith("conv1d.weight"):
            parameter.mul_(30.0)
        elif name.endswith(".D"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("conv1d.bias"):
            parameter.uniform_(-0.5, 0.5)
        elif name.endswith("norm_f.weight"):
            parameter.uniform_(0.7 * _LOGIT_SCALE, 1.3 * _LOGIT_SCALE)
        elif name.endswith("norm.weight"):
            parameter.uniform_(0.7, 1.3)
        elif name.endswith(("in_proj.bias", "out_proj.bias")):
            parameter.uniform_(-0.3, 0.3)


def write_hybrid(folder: Path, config_class: Any, model_class: Any, options: dict[str, Any]) -> Path:
    """Draw a hybrid's weights so that every part matters (see :func:`enliven`) and save it.

    ``options`` go to the configuration, but for these:

        seed: of the weights.
        final_norm: path of the last norm's weight.
        gains: (part of a name, factor) for matrices that should be larger than usual.
    """
    options = dict(options)
    seed, final_norm = options.pop("seed", 0), options.pop("final_norm", "model.norm.weight")
    gains = options.pop("gains", ())
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = config_class(**({"vocab_size": VOCABULARY} | tokens | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        enliven(model, gains)
        spread_logits(model, final_norm)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def enliven(model: nn.Module, gains: tuple[tuple[str, float], ...] = ()) -> None:
    """Redraw every weight so that no part of a model is idle.

    Matrices keep the size of what they multiply (queries' and keys' make it larger, so that attention chooses);
    decay is slow; filters are wide; biases and norms differ from channel to channel. A norm that starts at zero (one
    that multiplies by 1 + weight) stays about zero.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4.5, -3.5)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.uniform_(-4.0, -1.0)
        elif "conv" in name and parameter.dim() == 3:
            parameter.uniform_(-0.9, 0.9)
        elif parameter.dim() >= 2:
            factor = next((gain for part, gain in gains if part in name), 1.0)
            choosing = 1.7 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
            usual = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, usual * choosing * factor)
        elif name.endswith("bias") or (name.endswith("weight") and not parameter.any()):
            parameter.uniform_(-0.3, 0.3)
        elif name.endswith((".D", "weight")):
            parameter.uniform_(0.7, 1.3)
        else:
            parameter.uniform_(-0.5, 0.5)


@torch.no_grad()
def spread_logits(model: Any, final_norm: str, spread: float = 4.0) -> None:
    """Scale the last norm until logits have this standard deviation: greedy choices are then clear of rounding."""
    tokens = torch.randint(model.config.get_text_config().vocab_size, (1, 24))
    weight = dict(model.named_parameters())[final_norm]
    factor = spread / model(tokens, use_cache=False).logits.std()
    if weight.mean().abs() < 0.5:  # multiplies by 1 + weight
        weight.copy_((1 + weight) * factor - 1)
    else:
        weight.mul_(factor)


def write_tokenizer(folder: Path, vocab_size: int = VOCABULARY) -> None:
    """A byte-level BPE of at most ``vocab_size`` tokens; every text round-trips. Token 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write_mamba_ssm(source: Path, target: Path, *, tied_head_saved: bool = True) -> Path:
    """Rewrite a checkpoint into the layout of the ``mamba_ssm`` package (weights as safetensors).

    Args:
        tied_head_saved: keep a copy of a tied head in the file, as that package's own files do.
    """
    config = json.loads((source / "config.json").read_text())
    is_mamba2 = config["model_type"] == "mamba2"
    ssm = {"d_state": config["state_size"], "d_conv": config["conv_kernel"], "expand": config["expand"]}
    if is_mamba2:
        ssm |= {"layer": "Mamba2", "headdim": config["head_dim"], "ngroups": config["n_groups"]}
    else:
        ssm |= {"dt_rank": config["time_step_rank"]}
    tied = config["tie_word_embeddings"]
    original = {
        "d_model": config["hidden_size"], "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"] - 3, "pad_vocab_size_multiple": 8, "ssm_cfg": ssm,
        "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "tie_embeddings": tied,
    }  # fmt: skip
    assert config["vocab_size"] % 8 == 0, "the padded vocabulary must be the checkpoint's"
    tensors = {_original_name(n): t for n, t in read_tensors(source).items()}
    if tied and tied_head_saved:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"].clone()
    return _save(target, "config.json", original, "model.safetensors", tensors, source)


def write_codestral(source: Path, target: Path) -> Path:
    """Rewrite a Mamba-2 checkpoint (state 128, heads of 64, untied) into Codestral Mamba's layout."""
    config = json.loads((source / "config.json").read_text())
    fixed = (config["state_size"], config["head_dim"], config["conv_kernel"], config["expand"])
    assert fixed == (128, 64, 4, 2), "params.json has no keys for these"
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"], "n_groups": config["n_groups"], "rms_norm": True,
        "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 1,
        "tie_embeddings": config["tie_word_embeddings"], "model_type": "mamba",
    }  # fmt: skip
    tensors = {"model." + _original_name(n): t for n, t in read_tensors(source).items()}
    return _save(target, "params.json", params, "consolidated.safetensors", tensors, source)


def _original_name(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def _save(
    target: Path, config_name: str, config: Any, file: str, tensors: dict[str, Tensor], source: Path
) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    (target / config_name).write_text(json.dumps(config))
    save_file(tensors, target / file)
    for tokenizer_file in source.glob("tokenizer*.json"):
        shutil.copy(tokenizer_file, target)
    return target
