"""Write the trained weights in the Hugging Face layout and check that ``transformers`` computes the same logits.

Matrices become bfloat16; A_log, D and dt_bias stay float32. The head is the embedding matrix and is not stored.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import Mamba2, Shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('this model knows the roles system, user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
FLOAT32 = ("A_log", "D", "dt_bias")


def rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.float() if k.endswith(FLOAT32) else v.to(torch.bfloat16) for k, v in state.items()}


def config(shape: Shape, ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "expand": 2,
        "num_heads": shape.heads,
        "head_dim": shape.head_dim,
        "state_size": shape.state_size,
        "n_groups": 1,
        "conv_kernel": shape.conv_kernel,
        "chunk_size": shape.chunk_size,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": shape.eps,
        "residual_in_fp32": True,
        "rms_norm": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|endoftext|>"], ids["<|end|>"]],
        "pad_token_id": ids["<|pad|>"],
    }


def tokenizer_config(special: list[str]) -> dict[str, object]:
    named = {"<|endoftext|>", "<|pad|>"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": [t for t in special if t not in named],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_048_576,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(base: dict[str, object]) -> dict[str, object]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {**{k: base[k] for k in keys}, "do_sample": True, "temperature": 0.7, "top_p": 0.9}


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def largest_difference(
    shape: Shape, state: dict[str, torch.Tensor], folder: Path, ids: torch.Tensor
) -> float:
    """Between the training code and transformers, both float32 on the exported weights."""
    from transformers import AutoModelForCausalLM

    ours = Mamba2(shape).eval()
    ours.load_state_dict({k: v.float() for k, v in state.items()})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return float((ours.logits(ours(ids)) - theirs(ids, use_cache=False).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", type=Path, required=True, help="the folder of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of prepare.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    best = json.loads((args.trained / "best.json").read_text())
    shape = Shape(**best["shape"])
    state: dict[str, torch.Tensor] = {}
    for piece in sorted(args.trained.glob("best-*.safetensors")):
        state.update(load_file(piece))
    state = rounded(state)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    special = [t.content for _, t in sorted(tokenizer.get_added_tokens_decoder().items())]
    ids = {t: tokenizer.token_to_id(t) for t in special}

    save_file(state, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(args.out / "tokenizer.json"))
    base = config(shape, ids)
    write_json(args.out / "config.json", base)
    write_json(args.out / "tokenizer_config.json", tokenizer_config(special))
    write_json(args.out / "generation_config.json", generation_config(base))

    prompt = torch.randint(
        0, shape.vocab_size, (2, 4 * shape.chunk_size), generator=torch.Generator().manual_seed(0)
    )
    print("parameters", sum(v.numel() for v in state.values()))
    print("largest difference of logits to transformers:", largest_difference(shape, state, args.out, prompt))


if __name__ == "__main__":
    main()
