"""The offline face: prompts of every kind, results in order, and mistakes found before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import RealModel
from fakes import FakeModel, fake_engine

from recurra.engine.llm import LLM
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def fake_llm(**settings: Any) -> LLM:
    return LLM.of_engine(fake_engine(**settings))


@pytest.fixture(scope="module")
def llm(mamba2: RealModel) -> LLM:
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "mamba_config": {"backend": "reference"}}
    return LLM(str(mamba2.folder), max_num_seqs=4, **settings)


def test_every_kind_of_prompt(llm: LLM) -> None:
    assert llm.llm_engine.tokenizer is not None
    text = "The quick brown fox"
    ids = llm.llm_engine.tokenizer.encode(text)
    kinds: list[Any] = [text, ids, {"prompt_token_ids": ids}, {"prompt": text}]
    outputs = llm.generate(kinds, GREEDY, use_tqdm=False)
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert [o.prompt for o in outputs] == [text, None, None, text]
    (single,) = llm.generate(ids, GREEDY, use_tqdm=False)
    (alone,) = llm.generate(text, GREEDY, use_tqdm=False)
    assert single.outputs[0].text == alone.outputs[0].text == outputs[0].outputs[0].text != ""


def test_results_come_in_the_order_of_the_prompts() -> None:
    model = FakeModel()
    llm = fake_llm(model=model, num_state_slots=2)
    prompts: list[Any] = [[i] * (1 + i % 5) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + (7 * i) % 9) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert own.max_tokens is not None
        assert output.outputs[0].token_ids == model.greedy(prompt, own.max_tokens)
    assert llm.generate([], GREEDY) == []


def test_a_queue_limit_does_not_fail_a_batch() -> None:
    llm = fake_llm(num_state_slots=1, max_queue_len=2)
    outputs = llm.generate([[i] for i in range(9)], GREEDY, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [[i] for i in range(9)]


def test_priorities_go_first() -> None:
    llm = fake_llm(num_state_slots=1)
    outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    starts = [o.metrics.first_scheduled_time for o in outputs if o.metrics]
    assert starts == sorted(starts, key=lambda t: -(t or 0))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
        ([[1], [99]], GREEDY, "prompt 1: prompt_token_ids holds 99"),
        ([[1], "text"], GREEDY, "no tokenizer"),
        ([[1]], SamplingParams(stop="x"), "no tokenizer"),
        ([[1], [2]], [GREEDY], "1 sampling_params for 2 prompts"),
        ([[1] * 30], GREEDY, "max_model_len is 30"),
    ],
)
def test_one_bad_prompt_is_found_before_anything_is_queued(prompts: Any, params: Any, message: str) -> None:
    llm = fake_llm(max_model_len=30)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.stats().steps == 0


@pytest.mark.parametrize("prompts", [None, 5, b"text", {1, 2}, [b"text"], [{"prompt_token_ids": b"text"}]])
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        fake_llm().generate(prompts if prompts != {1, 2} else [prompts], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("sampling_params", {"sampling_params": {"temperature": 1.0}}),
        ("sampling_params", {"sampling_params": [GREEDY, None, GREEDY]}),
        ("priority", {"priority": ["a", 1, 2]}),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_and_nothing_is_queued(
    field: str, given: dict[str, Any]
) -> None:
    llm = fake_llm()
    with pytest.raises(RequestError, match=field) as caught:
        llm.generate([[1], [2], [3]], use_tqdm=False, **given)
    assert caught.value.param == field
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_conversation_is_a_list_of_messages(llm: LLM) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat([1], use_tqdm=False)  # type: ignore[list-item]


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(num_state_slots=2)
    engine, step, calls = llm.llm_engine, llm.llm_engine.step, iter(range(99))

    def interrupted() -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3], [4]], GREEDY, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.stats().used_slots == 0


def test_chat_renders_the_template(mamba2: RealModel) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    llm = LLM(
        str(mamba2.folder), device="cpu", num_threads=1, chat_template=template,
        mamba_config={"backend": "reference"}, max_num_seqs=2,
    )  # fmt: skip
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, GREEDY, use_tqdm=False)
    assert one.prompt == "user: hello\nassistant:"
    two = llm.chat([talk, talk], GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in two] == [one.outputs[0].text] * 2
    assert llm.generate(one.prompt, GREEDY, use_tqdm=False)[0].outputs[0].text == one.outputs[0].text


def test_chat_without_a_tokenizer_says_so() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        fake_llm().chat([{"role": "user", "content": "hello"}])


def test_a_progress_bar_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    fake_llm().generate([[1], [2]], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err + shown.out
    fake_llm().generate([[1], [2]], GREEDY, use_tqdm=False)
    shown = capsys.readouterr()
    assert not shown.err + shown.out


def test_skip_tokenizer_init_and_dummy_weights(mamba2: RealModel) -> None:
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "mamba_config": {"backend": "reference"}}
    dummy = [
        LLM(str(mamba2.folder), load_format="dummy", skip_tokenizer_init=True, seed=seed, **settings).generate(
            [[1, 2, 3]], GREEDY, use_tqdm=False
        )[0].outputs[0]
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert dummy[0].token_ids == dummy[1].token_ids != dummy[2].token_ids
    assert dummy[0].text == ""
