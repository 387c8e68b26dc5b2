"""Write a random Mamba or Mamba-2 checkpoint as GGUF, without a tokenizer, for llama.cpp.

Runs in the peers' environment (``benchmarks/peers.sh``), where ``gguf`` and ``safetensors`` are installed:

    python gguf_file.py CHECKPOINT_FOLDER OUT.gguf {F32,F16,BF16}

Vectors, the convolution and A stay float32, as llama.cpp wants them; every matrix takes the precision asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from safetensors.numpy import load_file

#: suffix of the checkpoint's tensor name in a layer, and llama.cpp's name for it
LAYER_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
TOP_NAMES = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}
FLOAT32_ALWAYS = ("ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight")


def llama_name(name: str) -> str | None:
    """llama.cpp's name of a checkpoint tensor; None for the tied head."""
    if name == "lm_head.weight":
        return None
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    layer, suffix = name.removeprefix("backbone.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[suffix]}"


def reshaped(name: str, data: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The layout that llama.cpp's graph expects."""
    if name.endswith("ssm_a"):
        data = -np.exp(data)
    if name.endswith("ssm_conv1d.weight"):
        return data.squeeze(1)
    if config["model_type"] == "mamba2":
        if name.endswith(("ssm_a", "ssm_d")):
            return data.reshape(-1, 1)
        if name.endswith("ssm_norm.weight"):
            return data.reshape(config["n_groups"], -1)
    return data


def write(folder: Path, target: Path, precision: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    mamba2 = config["model_type"] == "mamba2"
    writer = GGUFWriter(target, config["model_type"])
    inner = config["expand"] * config["hidden_size"]
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if mamba2:
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
    else:
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(False)
    writer.add_file_type(
        LlamaFileType.ALL_F32 if precision == "F32" else LlamaFileType[f"MOSTLY_{precision}"]
    )
    kind = GGMLQuantizationType[precision]
    for source, data in load_file(folder / "model.safetensors").items():
        name = llama_name(source)
        if name is None:
            continue
        value = np.ascontiguousarray(reshaped(name, data.astype(np.float32), config))
        if value.ndim > 1 and not name.endswith(FLOAT32_ALWAYS) and precision != "F32":
            writer.add_tensor(name, quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    print("gguf", gguf.__name__, sys.argv[1:])
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
