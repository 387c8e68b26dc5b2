"""``recurra explain``, ``collect-env`` and the handing over to ``serve``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run

import recurra.server
from checkpoints import write_hybrid
from recurra.cache.pool import slot_bytes
from recurra.ops.registry import OPERATORS


def test_explain_names_every_operator_and_every_reason(run: Run) -> None:
    result = run("explain", "--json")
    assert result.code == 0
    told = json.loads(result.out)
    assert [choice["operator"] for choice in told["operators"]] == [op.name for op in OPERATORS]
    assert told["model"] is None
    table = run("explain").out
    for choice in told["operators"]:
        assert choice["operator"] in table
    assert "it has no cpu kernels" in table


def test_explain_follows_the_flags(run: Run) -> None:
    told = json.loads(run("explain", "--json", "--mamba-backend", "reference").out)
    backends = {choice["backend"] for choice in told["operators"]}
    assert backends <= {"reference", "none"}


def test_explain_counts_what_the_engine_holds(run: Run, chat_model: Path) -> None:
    from recurra import LLM

    told = json.loads(run("explain", chat_model, "--json", "--max-num-seqs", 5).out)["model"]
    engine = LLM(str(chat_model), max_num_seqs=5).llm_engine
    model: Any = engine.runner.model
    assert told["parameters"] == sum(p.numel() for p in model.parameters())
    assert told["state_bytes"] == slot_bytes(model.state_specs)
    assert (told["max_num_seqs"], told["num_state_slots"]) == (5, engine.slots.num_free)
    assert told["sequences"] == told["free_bytes"] // told["state_bytes"] - 1
    assert (told["tokenizer"], told["chat_template"]) == (True, True)


def test_explain_shows_the_models_sampling_defaults(run: Run) -> None:
    shipped = Path(__file__).parents[2] / "models" / "recurra-tiny"
    assert "temperature 0.7, top_p 0.9" in run("explain", shipped).out
    told = json.loads(run("explain", shipped, "--json").out)["model"]["sampling_defaults"]
    assert told == {"temperature": 0.7, "top_p": 0.9}
    assert "none of its own" in run("explain", shipped, "--generation-config", "none").out


def test_explain_says_how_decode_steps_run(run: Run, ids_model: Path, tmp_path: Path) -> None:
    """A hybrid gives the compiled step up, and the reason is there to read."""
    from transformers import BambaConfig, BambaForCausalLM

    hybrid = write_hybrid(
        tmp_path / "bamba", BambaConfig, BambaForCausalLM,
        {
            "hidden_size": 32, "num_hidden_layers": 2, "attn_layer_indices": [1], "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 20, "mamba_n_heads": 4, "mamba_d_state": 8,
            "final_norm": "model.final_layernorm.weight",
        },
    )  # fmt: skip

    def step(*arguments: object) -> str:
        return str(json.loads(run("explain", "--json", *arguments).out)["model"]["decode_step"])

    assert step(ids_model) == "one compiled call"
    assert "enforce_eager" in step(ids_model, "--enforce-eager")
    assert "no backend here" in step(ids_model, "--mamba-backend", "reference")
    assert "stacks of Mamba blocks alone" in step(hybrid)
    assert "operator by operator" in run("explain", hybrid).out


def test_explain_shows_a_model_in_words(run: Run, ids_model: Path) -> None:
    text = run("explain", ids_model).out
    assert "Mamba2ForCausalLM" in text
    assert "the same at any length" in text
    assert "token ids in and out" in text


def test_explain_counts_the_pages_of_a_hybrid(run: Run, tmp_path: Path) -> None:
    from transformers import BambaConfig

    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8}
    BambaConfig(
        num_hidden_layers=3, attn_layer_indices=[1], mamba_d_state=16, mamba_n_groups=1, vocab_size=64,
        intermediate_size=32, max_position_embeddings=500, architectures=["BambaForCausalLM"], **sizes,
    ).save_pretrained(tmp_path)  # fmt: skip
    flags = ("--max-num-seqs", 3, "--block-size", 32)
    told = json.loads(run("explain", tmp_path, "--json", *flags).out)["model"]
    assert (told["token_bytes"], told["block_size"]) == (2 * 24 * 4, 32)
    assert told["num_kv_pages"] == 3 * 16, "three requests of 500 tokens"
    assert told["max_model_len"] == 500
    told = json.loads(run("explain", tmp_path, "--json", "--num-kv-pages", 7, *flags).out)["model"]
    assert (told["num_kv_pages"], told["max_model_len"]) == (7, 224)
    text = run("explain", tmp_path, "--num-kv-pages", 7, *flags).out
    assert "7 pages of 32 hold 224 tokens" in text
    assert "only" in run("explain", tmp_path, "--num-kv-pages", 1 << 40).err


def test_explain_refuses_as_the_engine_does(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    result = run("explain", tmp_path)
    assert result.code == 1
    assert "LlamaForCausalLM" in result.err
    assert "Mamba2ForCausalLM" in result.err


def test_collect_env_tells_versions_and_no_secrets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECURRA_API_KEY", "do-not-show")
    monkeypatch.setenv("RECURRA_NUM_THREADS", "2")
    monkeypatch.setenv("HOME_SECRET", "nor-this")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    result = run("collect-env", "--json")
    told = json.loads(result.out)
    assert told["environment"]["RECURRA_NUM_THREADS"] == "2"
    assert told["environment"]["RECURRA_API_KEY"] == "(set)"
    assert told["environment"]["TOKENIZERS_PARALLELISM"] == "false"
    assert told["packages"]["torch"]
    assert told["cpu"]["usable_cpus"] >= 1
    text = run("collect-env").out
    for output in (result.out, text):
        assert "do-not-show" not in output
        assert "nor-this" not in output
    assert "torch:" in text


def test_serve_hands_over_both_settings(run: Run, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(recurra.server, "serve", lambda server, engine: given.extend([server, engine]) or 7)
    result = run(
        "serve", chat_model, "--port", 0, "--api-key", "k", "--max-num-seqs", 3, "--max-queue-len", 9
    )
    assert result.code == 7
    server, engine = given
    assert (server.port, server.api_keys[0].get_secret_value()) == (0, "k")
    assert (engine.model, engine.max_num_seqs, engine.max_queue_len) == (str(chat_model), 3, 9)
