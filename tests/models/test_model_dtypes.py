"""Number formats of weights, activations and states; dummy weights; the fused decode step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import TOLERANCE, Machine, assert_close, machine_of, oracle_log_probs
from model_driver import Driver, Piece

import checkpoints
from oracle import load_oracle
from recurra.models import load_model, read_config

WRITERS = {
    "mamba": checkpoints.write_mamba,
    "falcon": checkpoints.write_falcon_mamba,
    "mamba2": lambda folder, **o: checkpoints.write_mamba2(folder, n_groups=2, **o),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Any:
    return WRITERS[request.param]


def tokens(count: int) -> list[int]:
    return torch.randint(checkpoints.VOCABULARY, (count,)).tolist()


def oracle(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return load_oracle(folder, dtype).to(device)


def test_float64_is_exact_to_rounding(write: Any, tmp_path: Path) -> None:
    """The reference in float64: whole = split = token by token to 1e-9, and float32 transformers is near."""
    folder = write(tmp_path)
    driver = machine_of("cpu", "reference").driver(folder, torch.float64)
    prompt = tokens(29)
    want = driver.whole(prompt)
    assert want.dtype == torch.float64
    assert (driver.pieces(prompt, [1, 17], slot=2) - want).abs().max() < 1e-9
    assert (driver.token_by_token(prompt, slot=3) - want).abs().max() < 1e-9
    assert_close(oracle_log_probs(oracle(folder), prompt), want.float())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_on_the_cpu(write: Any, tmp_path: Path, dtype: torch.dtype, backend: str) -> None:
    """Only the weights are narrow: everything is computed in float32, as if they had been widened."""
    folder = write(tmp_path, dtype=dtype)
    driver = machine_of("cpu", backend).driver(folder, dtype)
    model = driver.model
    assert isinstance(model, torch.nn.Module)
    formats = {name.rpartition("layers.0.")[2]: p.dtype for name, p in model.named_parameters()}
    assert formats["mixer.in_proj.weight"] == formats["embedding.weight"] == dtype
    for name in ("mixer.A", "mixer.D", "mixer.dt_bias", "mixer.conv1d.weight", "norm.weight"):
        assert formats[name] == torch.float32, name
    prompt = tokens(29)
    want = oracle_log_probs(oracle(folder), prompt)
    assert_close(driver.whole(prompt), want)
    assert_close(driver.token_by_token(prompt, slot=2), want)


def test_decay_is_exponentiated_in_float32(tmp_path: Path) -> None:
    """A = -exp(A_log): in bfloat16 the exponential would be off by up to half a percent."""
    folder = checkpoints.write_mamba2(tmp_path, dtype=torch.bfloat16)
    stored = checkpoints.read_tensors(folder)["backbone.layers.0.mixer.A_log"]
    model: Any = machine_of("cpu", "reference").driver(folder, torch.bfloat16).model
    assert torch.equal(model.layers[0].mixer.A, -stored.double().exp().float())


def test_weights_are_held_once(tmp_path: Path) -> None:
    """Every stored tensor fills one parameter; a tied head is the embedding itself."""
    folder = checkpoints.write_mamba(tmp_path)
    model: Any = machine_of("cpu", "reference").driver(folder).model
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    stored = sum(t.numel() for t in checkpoints.read_tensors(folder).values())
    assert sum(p.numel() for p in model.parameters()) == stored
    assert not any(p.requires_grad for p in model.parameters())


def dummy(folder: Path, **arguments: Any) -> Any:
    numbers = {"weight_dtype": torch.float32, "act_dtype": torch.float32} | arguments
    ops = machine_of("cpu", "reference").ops
    return load_model(
        read_config(folder), ops=ops, device=torch.device("cpu"), load_format="dummy", **numbers
    )


def test_dummy_weights(write: Any, tmp_path: Path) -> None:
    """They need the configuration alone, repeat with the seed, and give logits of ordinary size."""
    for weights in write(tmp_path).glob("*.safetensors"):
        weights.unlink()
    model, again, other = dummy(tmp_path), dummy(tmp_path), dummy(tmp_path, seed=1)
    for (name, value), same in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(value, same), name
        assert value.isfinite().all(), name
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    logits = Driver(model).whole(tokens(40))
    assert 0.3 < logits.std().item() < 3.0
    assert dummy(tmp_path, weight_dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16


def test_state_formats(write: Any, tmp_path: Path) -> None:
    model = dummy(write(tmp_path), conv_dtype=torch.bfloat16, ssm_dtype=torch.float16)
    for spec in model.state_specs:
        assert [t.dtype for t in spec.tensors[:2]] == [torch.bfloat16, torch.float16]
    logits = Driver(model).token_by_token(tokens(9))
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_decode_step(write: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """Several sequences, op by op and as one compiled call: the same hidden vectors, states and answers."""
    machine = machine_of("cpu", "cpu")
    if machine.ops.build_decode_stack is None:
        pytest.skip("no backend offers a fused decode step here")
    folder = write(tmp_path, dtype=dtype)
    op_by_op, fused = machine.driver(folder, dtype), machine.driver(folder, dtype)
    weights = fused.model.stack_weights()
    assert weights is not None
    step = machine.ops.build_decode_stack(weights, tuple(fused.pool.layers), machine.num_threads)
    prompts = {4: tokens(7), 1: tokens(12), 6: tokens(3)}
    for driver in (op_by_op, fused):
        driver.step(prefill=[Piece(slot, prompt) for slot, prompt in prompts.items()])
    slots = torch.tensor(list(prompts), dtype=torch.int32)
    for position in range(20):
        new = tokens(len(prompts))
        want = op_by_op.step(decode=[Piece(s, [t], 12 + position) for s, t in zip(prompts, new, strict=True)])
        hidden = step(torch.tensor(new), slots)
        assert_close(fused.model.logits(hidden).log_softmax(-1), torch.cat(want))
    for slot in prompts:
        for mine, theirs in zip(fused.pool.layers, op_by_op.pool.layers, strict=True):
            for a, b in ((mine.conv, theirs.conv), (mine.ssm, theirs.ssm)):
                scale = b[slot].abs().max()
                assert (a[slot] - b[slot]).abs().max() <= 1e-3 * scale
    assert all(fused.pool.layers[0].ssm[slot].isnan().all() for slot in (2, 3, 5, 7, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_on_a_gpu(write: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """Error at most twice that of transformers in the same format, both against float64."""
    folder = write(tmp_path, dtype=dtype)
    prompt = tokens(150)
    truth = machine_of("cpu", "reference").driver(folder, torch.float64).whole(prompt)
    theirs = oracle_log_probs(oracle(folder, dtype, "cuda"), prompt)
    driver = machine_of("cuda", "triton").driver(folder, dtype)
    allowed = 2 * (theirs - truth).abs().mean()
    for got in (driver.whole(prompt), driver.pieces(prompt, [64, 101], 2), driver.token_by_token(prompt, 3)):
        assert (got.cpu() - truth).abs().mean() <= allowed


def test_residual_stream_follows_the_configuration(tmp_path: Path, machine: Machine) -> None:
    """On the CPU it is float32 whatever the configuration says; the answer is transformers' float32 one."""
    folder = checkpoints.write_mamba2(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"residual_in_fp32": False}))
    prompt = tokens(11)
    assert (
        machine.driver(folder).whole(prompt).cpu() - oracle_log_probs(oracle(folder), prompt)
    ).abs().max() < TOLERANCE
