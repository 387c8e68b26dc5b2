"""Every model in every layout, however its tokens reach it, against transformers' plain forward."""

from __future__ import annotations

import random

import pytest
import torch
from model_cases import LENGTHS, TOLERANCE, Golden, Machine, assert_close, machine_of, oracle_log_probs
from model_driver import Driver, Piece

GREEDY = 48


@pytest.fixture
def driver(machine: Machine, golden: Golden) -> Driver:
    return machine.driver(golden.folder)


def test_the_checkpoints_can_tell(golden: Golden) -> None:
    """Forgetting the state, or only the convolution's window, moves log-probs far beyond the tolerance."""
    tokens, want = golden.prompts[37], golden.log_probs[37]
    driver = machine_of("cpu", "reference").driver(golden.folder)
    driver.whole(tokens[:20])
    forgotten = driver.step(prefill=[Piece(1, tokens[20:])])[0]
    assert (forgotten - want[20:])[5:].abs().max() > 100 * TOLERANCE
    driver.whole(tokens[:20])
    for layer in driver.pool.layers:
        layer.conv[1] = 0.0
    no_window = driver.step(prefill=[Piece(1, tokens[20:], 20)])[0]
    assert (no_window - want[20:]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompts(driver: Driver, golden: Golden, length: int) -> None:
    assert_close(driver.whole(golden.prompts[length]), golden.log_probs[length])


def test_split_at_every_cut(driver: Driver, golden: Golden) -> None:
    tokens, want = golden.prompts[13], golden.log_probs[13]
    for cut in range(1, 13):
        driver.poison(1)
        assert_close(driver.pieces(tokens, [cut]), want)


def test_split_into_ragged_pieces(driver: Driver, golden: Golden) -> None:
    assert_close(driver.pieces(golden.prompts[139], [1, 2, 5, 70, 135]), golden.log_probs[139])


def test_token_by_token(driver: Driver, golden: Golden) -> None:
    assert_close(driver.token_by_token(golden.prompts[37]), golden.log_probs[37])


def test_packed_with_others(driver: Driver, golden: Golden) -> None:
    """Six ragged prompts in one step, in slots that aren't in order; then once more the other way round."""
    slots = [5, 2, 8, 1, 7, 3]
    for lengths in (LENGTHS, LENGTHS[::-1]):
        got = driver.step(prefill=[Piece(s, golden.prompts[n]) for s, n in zip(slots, lengths, strict=True)])
        for log_probs, length in zip(got, lengths, strict=True):
            assert_close(log_probs, golden.log_probs[length])


def test_decode_and_prefill_in_one_step(driver: Driver, golden: Golden) -> None:
    """Two sequences decode while a third begins, a fourth goes on, and a padding row comes along."""
    a, b, c, d = (golden.prompts[n] for n in (37, 13, 4, 139))
    driver.step(prefill=[Piece(4, a[:30]), Piece(2, b[:9])])
    driver.step(prefill=[Piece(6, d[:77])])
    untouched = driver.pool.rows[[1, 5, 7, 8]].clone()
    got = driver.step(
        decode=[Piece(4, a[30:31], 30), Piece(0, [0]), Piece(2, b[9:10], 9)],
        prefill=[Piece(3, c), Piece(6, d[77:], 77)],
    )
    assert_close(got[0], golden.log_probs[37][30:31])
    assert_close(got[2], golden.log_probs[13][9:10])
    assert_close(got[3], golden.log_probs[4])
    assert_close(got[4], golden.log_probs[139][77:])
    assert torch.equal(driver.pool.rows[[1, 5, 7, 8]], untouched), "a slot outside the batch was written"
    assert_close(driver.step(decode=[Piece(4, a[31:32], 31)])[0], golden.log_probs[37][31:32])


def test_slots_are_reused(machine: Machine, golden: Golden) -> None:
    """One slot for one prompt after the other: what the last one left, even NaN, is never read."""
    driver = machine.driver(golden.folder, num_slots=1)
    for length in (37, 1, 3, 13, 4, 139, 1):
        assert_close(driver.whole(golden.prompts[length]), golden.log_probs[length])
    driver.poison(1)
    assert_close(driver.whole(golden.prompts[1]), golden.log_probs[1])


def test_saved_and_forked_states_go_on(driver: Driver, golden: Golden) -> None:
    tokens, want = golden.prompts[37], golden.log_probs[37]
    driver.whole(tokens[:20], slot=3)
    snapshot = driver.pool.save(3)
    driver.pool.fork(3, 5)
    driver.poison(3)
    driver.pool.restore(8, snapshot)
    for slot in (5, 8):
        assert_close(driver.step(prefill=[Piece(slot, tokens[20:], 20)])[0], want[20:])


def test_greedy_tokens(driver: Driver, golden: Golden) -> None:
    """48 greedy tokens; transformers' forward over all of them must choose each one too."""
    prompt = golden.prompts[13]
    answer = driver.greedy(prompt, GREEDY)
    want = oracle_log_probs(golden.oracle(), prompt + answer)[len(prompt) - 1 : -1]
    assert answer == want.argmax(-1).tolist()
    best = want.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 5 * TOLERANCE, "margins this small would make the test a lottery"


def test_identical_prompts_have_one_answer(driver: Driver, golden: Golden) -> None:
    """Eight copies, alone and together with others."""
    tokens = golden.prompts[37]
    got = driver.step(prefill=[Piece(slot, tokens) for slot in range(1, 9)])
    assert len({tuple(row.argmax(-1).tolist()) for row in got}) == 1
    for row in got:
        assert_close(row, golden.log_probs[37])


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule(driver: Driver, golden: Golden, seed: int) -> None:
    """All prompts at once, each advanced by random pieces in random steps, decoding or as prompt pieces."""
    draw = random.Random(seed)
    slots = dict(zip(LENGTHS, draw.sample(range(1, 9), len(LENGTHS)), strict=True))
    done, rows = dict.fromkeys(LENGTHS, 0), {length: [] for length in LENGTHS}
    while unfinished := [length for length in LENGTHS if done[length] < length]:
        decode, prefill = {}, {}
        for length in draw.sample(unfinished, draw.randint(1, len(unfinished))):
            start = done[length]
            count = min(draw.choice((1, 1, 2, 5, 23, 70)), length - start)
            piece = Piece(slots[length], golden.prompts[length][start : start + count], start)
            decodes = count == 1 and start > 0 and draw.random() < 0.7
            (decode if decodes else prefill)[length] = piece
            done[length] += count
        for length, got in zip(
            [*decode, *prefill], driver.step([*decode.values()], [*prefill.values()]), strict=True
        ):
            rows[length].append(got)
    for length in LENGTHS:
        assert_close(torch.cat(rows[length]), golden.log_probs[length])


def test_decode_as_one_compiled_call(golden: Golden) -> None:
    """Two sequences through the fused step, with a padding row between them, against transformers' answers."""
    machine = machine_of("cpu", "cpu")
    build = machine.ops.build_decode_stack
    if build is None:
        pytest.skip("no backend offers a fused decode step here")
    driver = machine.driver(golden.folder)
    weights = driver.model.stack_weights()
    assert weights is not None
    step = build(weights, driver.pool.layers, machine.num_threads)
    a, b = golden.prompts[37], golden.prompts[139]
    driver.step(prefill=[Piece(6, a[:5]), Piece(2, b[:1])])
    untouched = driver.pool.rows[[1, 3, 4, 5, 7, 8]].clone()
    slots = torch.tensor([6, 0, 2], dtype=torch.int32)
    for i in range(32):
        hidden = step(torch.tensor([a[5 + i], 0, b[1 + i]]), slots)
        got = driver.model.logits(hidden).log_softmax(-1)
        assert_close(got[0], golden.log_probs[37][5 + i])
        assert_close(got[2], golden.log_probs[139][1 + i])
    assert torch.equal(driver.pool.rows[[1, 3, 4, 5, 7, 8]], untouched), (
        "a slot outside the batch was written"
    )
    assert_close(driver.step(prefill=[Piece(2, b[33:], 33)])[0], golden.log_probs[139][33:])
