"""Every hybrid family, however its tokens reach it, against transformers' plain forward over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_cases import HYBRIDS
from model_cases import TOLERANCE, Golden, Machine, assert_close, golden_of, machine_of, oracle_log_probs
from model_driver import Driver, Piece

from oracle import load_oracle

#: One token, less than a window, less and more than a page of keys, and more than a kernel chunk.
LENGTHS = (1, 3, 13, 37, 80)
GREEDY = 48


@pytest.fixture(scope="module", params=HYBRIDS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = HYBRIDS[request.param](tmp_path_factory.mktemp(request.param) / "model")
    return golden_of(folder, folder, LENGTHS)


@pytest.fixture(params=["cpu/cpu", pytest.param("cuda/triton", marks=pytest.mark.gpu)])
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
    """Forgetting all that was read moves log-probs far beyond the tolerance."""
    tokens, want = golden.prompts[37], golden.log_probs[37]
    driver = machine_of("cpu", "reference").driver(golden.folder)
    assert_close(driver.whole(tokens), want)
    forgotten = driver.step(prefill=[Piece(1, tokens[20:])])[0]
    assert (forgotten - want[20:])[5:].abs().max() > 100 * TOLERANCE
    for i, spec in enumerate(driver.model.state_specs):
        driver.whole(tokens[:20])
        for tensor in driver.states[i]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                tensor.zero_()
        without = driver.step(prefill=[Piece(1, tokens[20:], 20)])[0]
        assert (without - want[20:]).abs().max() > 3 * TOLERANCE, (
            f"the state of mixer {i} ({spec}) is no matter"
        )


def test_packed_with_others_in_one_step(driver: Driver, golden: Golden) -> None:
    """Two sequences decode while others begin and go on, and a padding row comes along."""
    a, b, c, d = (golden.prompts[n] for n in (37, 13, 3, 80))
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


def test_greedy_tokens(driver: Driver, golden: Golden) -> None:
    """48 greedy tokens; transformers' forward over all of them must choose each one too."""
    prompt = golden.prompts[13]
    answer = driver.greedy(prompt, GREEDY)
    want = oracle_log_probs(golden.oracle(), prompt + answer)[len(prompt) - 1 : -1]
    best = want.topk(2).values
    clear = best[:, 0] - best[:, 1] > 5 * TOLERANCE
    assert clear.float().mean() > 0.8, "margins this small would make the test a lottery"
    chosen = want.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert (best[:, 0] - chosen).max() <= TOLERANCE


def test_bfloat16_is_as_near_as_transformers_own(machine: Machine, golden: Golden) -> None:
    """Weights in bfloat16: our error against float32 is at most three times transformers' own in bfloat16."""
    tokens, want = golden.prompts[37], golden.log_probs[37]
    theirs = oracle_log_probs(load_oracle(golden.hf_folder, torch.bfloat16), tokens)
    mine = machine.driver(golden.folder, torch.bfloat16).whole(tokens)
    assert (mine.cpu() - want).norm() <= 3 * (theirs - want).norm()


def test_dummy_weights_give_finite_scores(machine: Machine, golden: Golden) -> None:
    driver = machine.driver(golden.folder, load_format="dummy")
    assert driver.whole(golden.prompts[13]).isfinite().all()


def test_a_missing_and_a_spare_tensor_are_named(golden: Golden, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from recurra.errors import CheckpointError

    tensors = load_file(golden.folder / "model.safetensors")
    name = sorted(name for name in tensors if "layers." in name)[0]
    tensors["spare.tensor"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden.folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="spare.tensor") as error:
        machine_of("cpu", "reference").driver(tmp_path)
    assert name in str(error.value)
