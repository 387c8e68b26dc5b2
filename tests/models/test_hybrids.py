"""Every hybrid family, however its tokens reach it, against a plain forward over all of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hybrid_cases import Answer, Case, find_cases
from model_cases import TOLERANCE, Machine, assert_close, machine_of
from model_driver import Driver, Piece
from safetensors.torch import save_file
from torch import Tensor

import checkpoints
from recurra.errors import CheckpointError
from recurra.models import ARCHITECTURES, read_config, skeleton

#: One token, less than a window, less and more than a page of keys, and more than a kernel chunk.
LENGTHS = (1, 3, 13, 37, 80)
GREEDY = 48
CASES = find_cases()


@dataclass(frozen=True)
class Golden:
    """A checkpoint, prompts by length, and the log-probs (tokens, vocabulary) that are right for them."""

    case: Case
    folder: Path
    prompts: dict[int, list[int]]
    log_probs: dict[int, Tensor]
    answer: Answer


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    case = CASES[request.param]
    folder = case.write(tmp_path_factory.mktemp(request.param) / "model")
    answer = case.answer(folder, torch.float32)
    generator = torch.Generator().manual_seed(7)
    vocabulary = read_config(folder).vocab_size
    prompts = {n: torch.randint(vocabulary, (n,), generator=generator).tolist() for n in LENGTHS}
    return Golden(case, folder, prompts, {n: answer(tokens) for n, tokens in prompts.items()}, answer)


@pytest.fixture(params=["cpu/reference", "cpu/cpu", pytest.param("cuda/triton", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    device, _, backend = request.param.partition("/")
    return machine_of(device, backend)


@pytest.fixture
def driver(machine: Machine, golden: Golden) -> Driver:
    return machine.driver(golden.folder)


def test_whole_in_pieces_and_token_by_token(driver: Driver, golden: Golden) -> None:
    for length in LENGTHS:
        assert_close(driver.whole(golden.prompts[length]), golden.log_probs[length])
    for cut in (1, 2, 4, 7, 12):
        driver.poison(1)
        assert_close(driver.pieces(golden.prompts[13], [cut]), golden.log_probs[13])
    assert_close(driver.pieces(golden.prompts[80], [1, 2, 5, 66, 79]), golden.log_probs[80])
    assert_close(driver.token_by_token(golden.prompts[37]), golden.log_probs[37])


def test_the_checkpoint_can_tell(golden: Golden) -> None:
    """Forgetting all that was read, or what any one mixer read, moves log-probs beyond the tolerance."""
    tokens, want = golden.prompts[37], golden.log_probs[37]
    driver = machine_of("cpu", "reference").driver(golden.folder)
    driver.whole(tokens[:20])
    forgotten = driver.step(prefill=[Piece(1, tokens[20:])])[0]
    assert (forgotten - want[20:])[5:].abs().max() > 100 * TOLERANCE
    for i, spec in enumerate(driver.model.state_specs):
        driver.whole(tokens[:20])
        for tensor in driver.states[i]:
            if isinstance(tensor, Tensor):
                tensor.zero_()
        without = driver.step(prefill=[Piece(1, tokens[20:], 20)])[0]
        moved = (without - want[20:]).abs().max()
        assert i in golden.case.weightless or moved > 20 * TOLERANCE, (
            f"mixer {i} ({spec}) is no matter: {moved}"
        )


def test_packed_with_others_in_reused_slots(driver: Driver, golden: Golden) -> None:
    """All prompts in one step, twice; then some decode while others begin and go on beside a padding row."""
    slots = [5, 2, 8, 1, 7]
    for lengths in (LENGTHS, LENGTHS[::-1]):
        got = driver.step(prefill=[Piece(s, golden.prompts[n]) for s, n in zip(slots, lengths, strict=True)])
        for log_probs, length in zip(got, lengths, strict=True):
            assert_close(log_probs, golden.log_probs[length])
    a, b, c, d = (golden.prompts[n] for n in (37, 13, 3, 80))
    for slot in range(1, 9):
        driver.poison(slot)
    driver.step(prefill=[Piece(4, a[:30]), Piece(2, b[:9])])
    driver.step(prefill=[Piece(6, d[:41])])
    untouched = driver.pool.rows[[1, 5, 7, 8]].clone()
    got = driver.step(
        decode=[Piece(4, a[30:31], 30), Piece(0, [0]), Piece(2, b[9:10], 9)],
        prefill=[Piece(3, c), Piece(6, d[41:], 41)],
    )
    assert_close(got[0], golden.log_probs[37][30:31])
    assert_close(got[2], golden.log_probs[13][9:10])
    assert_close(got[3], golden.log_probs[3])
    assert_close(got[4], golden.log_probs[80][41:])
    assert torch.equal(driver.pool.rows[[1, 5, 7, 8]], untouched), "a slot outside the batch was written"
    assert_close(driver.step(decode=[Piece(4, a[31:32], 31)])[0], golden.log_probs[37][31:32])


@pytest.mark.parametrize("device", ["cpu/cpu", pytest.param("cuda/triton", marks=pytest.mark.gpu)])
def test_greedy_tokens(golden: Golden, device: str) -> None:
    """48 greedy tokens: in the plain forward over all of them, none is likelier by more than rounding."""
    prompt = golden.prompts[13]
    answer = machine_of(*device.split("/")).driver(golden.folder).greedy(prompt, GREEDY)
    want = golden.answer(prompt + answer)[len(prompt) - 1 : -1]
    best = want.topk(2).values
    assert (best[:, 0] - best[:, 1] > 5 * TOLERANCE).float().mean() > 0.9, (
        "margins as small as that tell little"
    )
    assert (best[:, 0] - want.gather(-1, torch.tensor(answer)[:, None])[:, 0]).max() <= 2 * TOLERANCE


def test_bfloat16_is_near(machine: Machine, golden: Golden, tmp_path: Path) -> None:
    """The error of a bfloat16 checkpoint is at most three times that of the plain forward in bfloat16."""
    tensors = {name: t.bfloat16() for name, t in checkpoints.read_tensors(golden.folder).items()}
    folder = _with_tensors(golden.folder, tmp_path, tensors)
    tokens = golden.prompts[37]
    truth = golden.case.answer(folder, torch.float32)(tokens)
    theirs = golden.case.answer(folder, torch.bfloat16)(tokens)
    mine = machine.driver(folder, torch.bfloat16).whole(tokens).cpu()
    assert (mine - truth).abs().mean() <= 3 * (theirs - truth).abs().mean()


def test_dummy_weights_and_their_count(golden: Golden) -> None:
    """Scores of ordinary size; the model without weights has as many parameters and the same states."""
    machine = machine_of("cpu", "cpu")
    driver = machine.driver(golden.folder, load_format="dummy")
    scores = driver.whole(golden.prompts[13])
    assert scores.isfinite().all()
    assert scores.std() > 0.05
    dtype = torch.float32
    bare = skeleton(
        read_config(golden.folder), ops=machine.ops, weight_dtype=dtype, act_dtype=dtype, conv_dtype=dtype,
        ssm_dtype=dtype,
    )  # fmt: skip
    assert bare.state_specs == driver.model.state_specs
    assert [p.shape for p in bare.parameters()] == [p.shape for p in driver.model.parameters()]
    assert driver.model.stack_weights() is None


def test_faults_are_named(golden: Golden, tmp_path: Path) -> None:
    """Any tensor that is missing, spare or misshapen stops the loading and is named."""
    tensors = checkpoints.read_tensors(golden.folder)
    spoilt = [next(name for name in tensors if part in name) for part in golden.case.tensors]
    for name in spoilt or sorted(tensors)[:: max(1, len(tensors) // 4)]:
        # Families may give what is before the layers another spelling.
        end = name[name.find("layers.") :] if "layers." in name else ".".join(name.split(".")[-2:])
        rest = {key: t for key, t in tensors.items() if key != name}
        for problem, changed in (
            (f"missing: .*{end}", rest),
            ("left over.*spare.tensor", tensors | {"spare.tensor": torch.zeros(1)}),
            (f"{end} in .* has shape", rest | {name: torch.zeros(3, *tensors[name].shape)}),
        ):
            folder = _with_tensors(golden.folder, tmp_path / "spoilt", changed)
            with pytest.raises(CheckpointError, match=problem):
                machine_of("cpu", "reference").driver(folder)
            shutil.rmtree(folder)


def test_configurations_without_architectures(golden: Golden, tmp_path: Path) -> None:
    """``model_type`` finds the family when ``architectures`` is missing."""
    folder = Path(shutil.copytree(golden.folder, tmp_path / "anonymous"))
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("architectures")[0] in ARCHITECTURES
    (folder / "config.json").write_text(json.dumps(config))
    assert read_config(folder).architecture == read_config(golden.folder).architecture


def _with_tensors(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """A folder with the configuration of ``source`` and other tensors."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors")
    return target
