"""Sampling against plain definitions in float64, and independence of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recurra.engine import rows
from recurra.engine.sampler import Choices, Sampler
from recurra.engine.seeds import answer_seed, uniforms
from recurra.sampling_params import SamplingParams
from recurra.types import Request, Sequence

V = 37


def make(prompt: tuple[int, ...] = (1, 2), answer: tuple[int, ...] = (), **params: Any) -> Sequence:
    request = Request("r", prompt, SamplingParams(**({"max_tokens": 64} | params)))
    return Sequence(request, 0, [*prompt, *answer])


def sampler(spell: dict[str, list[tuple[int, ...]]] | None = None, seed: int = 0) -> Sampler:
    return Sampler(
        V, torch.device("cpu"), seed, frozenset([0]), (spell or {}).__getitem__, lambda i: f"<{i}>"
    )


def sample(logits: Tensor, *sequences: Sequence, using: Sampler | None = None) -> Choices:
    chooser = sampler() if using is None else using
    for sequence in sequences:
        chooser.add([sequence])
    return chooser.sample(logits.clone(), list(sequences))


def logits(count: int = 1, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(count, V)


def distribution(row: Tensor, params: SamplingParams) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the draws should follow, by sorting: min_p, then top_k, then top_p."""
    x = row.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        reach = np.searchsorted(np.cumsum(p[order]), params.top_p) + 1
        p[order[reach:]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 0.1},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    count, row = 4000, logits()[0]
    sequences = [make(seed=i, **params) for i in range(count)]
    tokens = sample(row.expand(count, V), *sequences).tokens
    expected = distribution(row, SamplingParams(**params))
    seen = np.bincount(tokens, minlength=V)
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected)), "nothing outside the filter"
    sigma = np.sqrt(count * expected * (1 - expected)) + 1e-9
    assert np.abs(seen - count * expected).max() <= 5 * sigma.max() + 1
    assert (np.abs(seen - count * expected) / (sigma + 1)).max() < 5


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    x = logits(40)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"frequency_penalty": 1.0},
        {"logit_bias": {5: 4.0}}, {"min_tokens": 9}, {"repetition_penalty": 1.5, "logprobs": 3},
    ]  # fmt: skip
    parts = [make(seed=100 + i, answer=(5, 6, 6), **kinds[i % len(kinds)]) for i in range(40)]
    together = sample(x, *parts)
    for i, part in enumerate(parts):
        alone = sample(x[i : i + 1], part)
        assert alone.tokens == together.tokens[i : i + 1]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = logits(20)
    ones = torch.ones(20)
    filters = rows.Filters(ones * 1.3, torch.full((20,), 9), 0.8 * ones.double(), -3 * ones, True, True)
    uniform = torch.rand(20, dtype=torch.float64)
    whole = rows.choose(x, x.max(-1).values, filters, uniform)
    monkeypatch.setattr(rows, "MAX_ELEMENTS", 3 * V)
    assert torch.equal(rows.choose(x, x.max(-1).values, filters, uniform), whole)


def test_the_cpu_form_draws_the_same_tokens_as_the_torch_form() -> None:
    """Both invert the same distribution at the same uniforms; sums differ in their last bits alone."""
    count = 400
    x = logits(count, spread=3.0)
    best = x.max(-1).values
    generator = np.random.default_rng(0)
    pick = lambda values: torch.tensor(generator.choice(values, count))  # noqa: E731
    for cut, floor in ((False, False), (True, False), (False, True), (True, True)):
        filters = rows.Filters(
            temperature=pick([0.3, 1.0, 2.0]).float(),
            top_k=pick([1, 5, 20, V]) if cut else torch.full((count,), V),
            top_p=pick([0.2, 0.9, 1.0]) if cut else torch.ones(count, dtype=torch.float64),
            log_min_p=pick([-np.inf, -2.0]).float() if floor else torch.full((count,), -np.inf),
            any_cut=cut,
            any_floor=floor,
        )
        uniform = torch.rand(count, dtype=torch.float64)
        plain = rows.choose(x, best, filters, uniform)
        assert torch.equal(rows.chooser(V, torch.device("cpu"))(x, best, filters, uniform), plain)


@pytest.mark.parametrize("size", [3, 512, 1024, 5000, 20000])
@pytest.mark.parametrize("spread", [0.001, 2.0, 20.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_rows_of_several_blocks_draw_what_the_torch_form_draws(
    size: int, spread: float, top_p: float
) -> None:
    x = spread * torch.randn(1, size)
    x[0, 1] = float("-inf")
    uniform = torch.arange(0, 1, 0.02, dtype=torch.float64)
    one = torch.ones(50)
    filters = rows.Filters(one, torch.full((50,), size), top_p * one.double(), -math.inf * one, True, False)
    many = x.expand(50, size).contiguous()
    best = many.max(-1).values
    got = rows.chooser(size, torch.device("cpu"))(many, best, filters, uniform)
    assert torch.equal(got, rows.choose(many, best, filters, uniform))
    assert 1 not in got


def test_greedy_takes_the_likeliest_and_an_unused_seed_is_not_spent() -> None:
    x = logits(3)
    assert sample(x, *(make(temperature=0.0) for _ in range(3))).tokens == x.argmax(-1).tolist()


def test_penalties_equal_their_definition() -> None:
    x = logits()
    sequence = make(
        prompt=(3, 3, 4), answer=(4, 9, 9, 9), temperature=0.0, presence_penalty=0.7, frequency_penalty=0.3,
        repetition_penalty=1.6,
    )  # fmt: skip
    expected = x[0].double().clone()
    for token in (3, 4, 9):
        expected[token] = expected[token] / 1.6 if expected[token] > 0 else expected[token] * 1.6
    for token, times in ((4, 1), (9, 3)):
        expected[token] -= 0.3 * times + 0.7
    choices = sample(x, sequence)
    assert choices.best[0] == pytest.approx(expected.max().item(), abs=1e-6)
    assert choices.tokens[0] == int(expected.argmax())


def test_penalties_kept_from_step_to_step_equal_penalties_made_anew() -> None:
    chooser, sequence = sampler(), make(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3)
    chooser.add([sequence])
    for _ in range(30):
        x = logits()
        step = chooser.sample(x.clone(), [sequence])
        fresh = make(
            answer=tuple(sequence.output_ids), temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3
        )
        assert sample(x, fresh).best == step.best
        sequence.token_ids.append(step.tokens[0])


def test_logit_bias_adds_and_can_forbid() -> None:
    x = logits()
    best = int(x.argmax())
    assert sample(x, make(temperature=0.0, logit_bias={best: -100.0})).tokens[0] != best
    assert sample(x, make(temperature=0.0, logit_bias={7: 50.0})).tokens == [7]
    assert sample(x, make(temperature=0.0, logit_bias={7: 50.0})).best[0] == pytest.approx(
        x[0, 7].item() + 50
    )


def test_bad_words_are_not_completed() -> None:
    x = torch.zeros(1, V)
    x[0, 8] = 9.0
    spell = {"bad": [(6, 7, 8)], "worse": [(8,)]}

    def choose(answer: tuple[int, ...], word: str, prompt: tuple[int, ...] = (1,)) -> int:
        part = make(prompt=prompt, answer=answer, temperature=0.0, bad_words=[word])
        return sample(x, part, using=sampler(spell)).tokens[0]

    assert choose((6, 7), "bad") != 8
    assert choose((5, 6, 7), "bad") != 8
    assert choose((7,), "bad") == 8, "only the whole word counts"
    assert choose((6, 6), "bad") == 8
    assert choose((7,), "bad", prompt=(6,)) == 8, "a word begun by the prompt is not the answer's"
    assert choose((), "worse") != 8


def test_min_tokens_bars_every_end() -> None:
    x = torch.zeros(1, V)
    x[0, 0], x[0, 5] = 9.0, 8.0
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [5]}
    assert sample(x, make(answer=(3,), **params)).tokens[0] not in (0, 5)
    assert sample(x, make(answer=(3, 3), **params)).tokens == [0]
    assert sample(x, make(answer=(3,), ignore_eos=True, **params)).tokens == [0], "no end, so not barred"


def test_logprobs_are_of_the_raw_distribution() -> None:
    x = logits(3)
    raw = torch.log_softmax(x.double(), -1)
    sequences = [
        make(seed=1, logprobs=4, temperature=5.0, logit_bias={3: 3.0}),
        make(temperature=0.0),
        make(seed=2, logprobs=0, top_k=1),
    ]
    choices = sample(x, *sequences)
    assert set(choices.logprobs) == {0, 2}
    first = choices.logprobs[0]
    assert next(iter(first)) == choices.tokens[0], "the chosen token is always there, first"
    likeliest = raw[0].argsort(descending=True).tolist()
    assert set(likeliest[:4]) | {choices.tokens[0]} == set(first)
    for token, entry in first.items():
        assert entry.logprob == pytest.approx(raw[0, token].item(), abs=1e-6)
        assert entry.rank == likeliest.index(token) + 1
        assert entry.decoded_token == f"<{token}>"
    assert list(choices.logprobs[2]) == [choices.tokens[2]]


def test_a_row_of_nan_disturbs_no_other_row() -> None:
    x = logits(4)
    parts = [make(seed=i, top_p=0.9, logprobs=1) for i in range(4)]
    clean = sample(x, *parts)
    x[1] = float("nan")
    broken = sample(x, *parts)
    assert [broken.tokens[i] for i in (0, 2, 3)] == [clean.tokens[i] for i in (0, 2, 3)]
    assert not math.isfinite(broken.best[1])
    assert 0 <= broken.tokens[1] < V


def test_the_greatest_uniform_draws_the_last_possible_token() -> None:
    x = torch.full((1, V), float("-inf"))
    x[0, 4], x[0, 11] = 0.0, 0.0
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert rows.draw(x, last).tolist() == [11]
    assert rows.draw(x, torch.zeros(1, dtype=torch.float64)).tolist() == [4]
    assert rows.draw(x, torch.tensor([0.5], dtype=torch.float64)).tolist() == [11]


def test_entries_that_tie_at_the_edge_stay_whatever_their_place() -> None:
    x = torch.tensor([[0.0, -1.0, -1.0, -2.0]])
    least = rows.threshold(x, torch.tensor([2]), torch.ones(1, dtype=torch.float64))
    assert (x >= least).tolist() == [[True, True, True, False]]


def test_uniforms_are_even_and_streams_are_apart() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    places = np.tile(np.arange(200, dtype=np.uint64), 200)
    u = uniforms(seeds, places)
    assert u.min() >= 0
    assert u.max() < 1
    assert len(np.unique(u)) == len(u)
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert np.abs(counts - 800).max() < 5 * math.sqrt(800)
    grid = u.reshape(200, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03, "neighbouring seeds"
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03, "neighbouring places"


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 0, 2**64 - 1, 2**200):
        assert 0 <= answer_seed(seed, 3) < 2**64
        sample(logits(), make(seed=seed))
    assert answer_seed(5, 2) == answer_seed(7, 0)
