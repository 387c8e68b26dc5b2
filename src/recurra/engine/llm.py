"""Offline generation: prompts in, finished outputs out, in order.

>>> llm = LLM("checkpoints/mamba2-130m")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recurra.config.engine import EngineConfig
from recurra.engine.engine import LLMEngine
from recurra.engine.prompts import make_request, read_priority
from recurra.engine.sessions import State, continued, load_state, save_state
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import PromptInput, RequestOutput

Message = Mapping[str, Any]


class LLM:
    """A model for batch work.

    Args:
        model: checkpoint folder.
        settings: the other fields of :class:`recurra.config.engine.EngineConfig`.

    Raises:
        ConfigError: a setting that can't work.
        CheckpointError: the checkpoint can't be read.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.llm_engine = LLMEngine(EngineConfig(model=model, **settings))
        self._ids = itertools.count()

    @classmethod
    def of_engine(cls, engine: LLMEngine) -> LLM:
        """The same face on an engine that exists already."""
        llm = cls.__new__(cls)
        llm.llm_engine = engine
        llm._ids = itertools.count()
        return llm

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What answers a prompt that comes without parameters: the defaults that the checkpoint's
        generation_config.json sets (unless ``generation_config="none"``), then those of SamplingParams."""
        return SamplingParams(**self.llm_engine.sampling_defaults)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        state: State | Sequence[State] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts.

        Args:
            prompts: one prompt or several; each is text, a list of token ids, or
                ``{"prompt_token_ids": [...]}``.
            sampling_params: for all, or one for each; taken as they are. None: those of
                :meth:`get_default_sampling_params`.
            use_tqdm: show a progress bar.
            priority: one for each prompt, lower first.
            state: what the prompts go on from, one for all or one for each: they are texts after its text,
                which is not computed again.

        Returns:
            an output for each prompt, in their order.

        Raises:
            RequestError: a prompt or its parameters can't be served; nothing was queued.
            StateError: ``state`` is another model's.
        """
        work = _as_list(prompts)
        if state is not None:
            work = self._continued(state, work)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _params_for(sampling_params, len(work))
        priorities = [read_priority(p) for p in priority] if priority is not None else [0] * len(work)
        if len(priorities) != len(work):
            raise RequestError(
                f"{len(priorities)} priorities for {len(work)} prompts; give one for each", param="priority"
            )
        ready = [self._checked(i, p, s, len(work)) for i, (p, s) in enumerate(zip(work, params, strict=True))]
        ids = [str(next(self._ids)) for _ in work]
        with _bar(use_tqdm, len(work)) as bar:
            return self._run(list(zip(ids, ready, params, priorities, strict=True)), bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's chat template.

        Args:
            messages: a conversation (dicts with ``role`` and ``content``), or several.
            template_kwargs: passed to the template.

        Raises:
            RequestError: there is no tokenizer or no template, or the template refuses the messages.
        """
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer; this model has none", param="messages")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[PromptInput] = []
        for conversation in conversations:
            if not isinstance(conversation, list | tuple):
                raise RequestError(
                    f"a conversation is a list of messages, got {conversation!r:.80}", param="messages"
                )
            text = tokenizer.render_chat(conversation, add_generation_prompt, **template_kwargs)
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def save_state(
        self, source: RequestOutput | PromptInput, index: int = 0, *, cache_salt: str | None = None
    ) -> State:
        """What the model remembers after a text, to be kept, written to a file, and continued.

        Args:
            source: an output of :meth:`generate` (its prompt and an answer), or a prompt.
            index: which of the output's answers.
            cache_salt: the salt that the request had.

        Raises:
            RequestError: the text can't be served, or this engine keeps no states.
        """
        return save_state(self.llm_engine, source, index, cache_salt)

    def _continued(self, state: State | Sequence[State], prompts: list[PromptInput]) -> list[PromptInput]:
        states = [state] * len(prompts) if isinstance(state, State) else list(state)
        if len(states) != len(prompts):
            raise RequestError(
                f"{len(states)} states for {len(prompts)} prompts; give one, or one for each", param="state"
            )
        for one in {id(s): s for s in states}.values():
            load_state(self.llm_engine, one)
        return [continued(self.llm_engine, s, p) for s, p in zip(states, prompts, strict=True)]

    def _checked(self, number: int, prompt: PromptInput, params: SamplingParams, total: int) -> PromptInput:
        """The prompt as ids, refused now if it can't be served."""
        engine = self.llm_engine
        try:
            request = make_request(
                "", prompt, params, 0, tokenizer=engine.tokenizer,
                vocab_size=engine.runner.model.vocab_size, max_model_len=engine.max_model_len,
            )  # fmt: skip
        except RequestError as error:
            if total == 1:
                raise
            raise RequestError(
                f"prompt {number}: {error}", param=error.param, status=error.status, code=error.code
            ) from None
        ids: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
        if request.cache_salt is not None:
            ids["cache_salt"] = request.cache_salt
        return ids if request.prompt is None else ids | {"prompt": request.prompt}

    def _run(
        self, work: list[tuple[str, PromptInput, SamplingParams, int]], bar: Progress
    ) -> list[RequestOutput]:
        """Feed the queue as it has room, and collect final outputs."""
        engine, done = self.llm_engine, dict[str, RequestOutput]()
        task = bar.add_task("answering", total=len(work), speed="")
        waiting = list(reversed(work))
        limit = engine.limits.max_queue_len
        try:
            while waiting or engine.has_unfinished_requests():
                while waiting and (limit is None or engine.scheduler.num_waiting_new < max(limit, 1)):
                    engine.add_request(*waiting.pop())
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        bar.update(task, advance=1)
        except BaseException:
            engine.abort_request(request_id for request_id, *_ in work)
            engine.step()
            raise
        return [done[request_id] for request_id, *_ in work]


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Several prompts from one or several; a list of integers is one."""
    if isinstance(prompts, str | dict):
        return [prompts]
    given: object = prompts
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise RequestError(
            f"prompts must be text, token ids, or a list of either, got {type(prompts).__name__}",
            param="prompt",
        )
    listed = list(prompts)
    if listed and not isinstance(listed[0], str | dict | Sequence):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _params_for(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, Mapping | str) or not all(isinstance(params, SamplingParams) for params in given):
        raise RequestError(
            f"sampling_params must be a SamplingParams, or a list of one for each prompt, got {given!r:.80}",
            param="sampling_params",
        )
    if len(given) != count:
        raise RequestError(
            f"{len(given)} sampling_params for {count} prompts; give one, or one for each",
            param="sampling_params",
        )
    return list(given)


def _bar(visible: bool, total: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not visible or total == 0, transient=False)
