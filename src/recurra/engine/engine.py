"""The step loop.

>>> engine = LLMEngine(EngineConfig(model="checkpoints/mamba2-130m"))
>>> engine.add_request("one", "Once upon a time", SamplingParams(max_tokens=20))
>>> while engine.has_unfinished_requests():
...     for output in engine.step():
...         print(output.outputs[0].text)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from functools import partial

from recurra.cache.alloc import PageAllocator, SlotAllocator
from recurra.cache.pages import PagePool, page_bytes
from recurra.cache.pool import StatePool
from recurra.cache.spec import join_layers, paged, recurrent
from recurra.config.engine import EngineConfig
from recurra.engine.caching import cache_numbers, make_cache
from recurra.engine.forward import make_forward
from recurra.engine.graphs import GraphLimits
from recurra.engine.loading import Parts, Progress, end_ids, load, state_rounding
from recurra.engine.metrics import Counters, EngineStats
from recurra.engine.outputs import OutputBook
from recurra.engine.paging import Paging, move_cost
from recurra.engine.prompts import make_request, spell_out
from recurra.engine.reuse import ReuseStats
from recurra.engine.runner import Launched, Runner, StepResult
from recurra.engine.sampler import Sampler
from recurra.engine.scheduler import Plan, Scheduler
from recurra.engine.warmup import warm_up
from recurra.errors import RecurraError
from recurra.sampling_params import SamplingParams
from recurra.types import PromptInput, RequestOutput, Sequence, Status


class LLMEngine:
    """One model serving many requests at once. Not thread-safe: one thread calls all methods.

    Args:
        config: the settings.
        progress: told while weights load.
        parts: a model that is loaded already; None loads the one that ``config`` names.

    Attributes:
        config: the settings as given.
        model_config: the checkpoint's numbers.
        max_model_len: most tokens of a request, prompt and answer.
        tokenizer: None: token ids in and out.
        ops: the operators and why each was chosen.
        cache: kept states; None: every prompt is computed whole.
        sampling_defaults: fields of ``SamplingParams`` that the checkpoint sets for callers who don't. They
            are applied by the faces: ``params`` of :meth:`add_request` are taken as they are.

    Raises:
        ConfigError: a setting that can't work.
        CheckpointError: the checkpoint can't be read.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, parts: Parts | None = None
    ) -> None:
        parts = parts or load(config, progress)
        settled, model = parts.settled, parts.model
        self.config = config
        self.model_config = parts.model_config
        self.max_model_len = settled.max_model_len
        self.tokenizer = parts.tokenizer
        self.ops = parts.ops
        self.sampling_defaults = dict(parts.sampling_defaults)
        device = settled.device.torch_device
        self.limits = parts.limits
        self.slots = SlotAllocator(parts.num_slots)
        rounding = state_rounding(settled, config.seed)
        pool = StatePool(recurrent(model.state_specs), parts.num_slots, device, rounding)
        pages = PagePool(paged(model.state_specs), parts.num_pages, parts.page_size, device)
        layers = join_layers(model.state_specs, pool.layers, pages.layers)
        forward = make_forward(
            model, layers, parts.ops, settled.device.num_threads, config.enforce_eager,
            GraphLimits(parts.limits.max_num_seqs, settled.max_model_len, parts.page_size, device),
        )  # fmt: skip
        spell = None if parts.tokenizer is None else partial(spell_out, tokenizer=parts.tokenizer)
        texts = parts.tokenizer.token_to_string if parts.tokenizer is not None else _no_text
        sampler = Sampler(model.vocab_size, device, config.seed, end_ids(parts), spell, texts)
        self.runner = Runner(model, forward, pool, sampler, device, pages)
        page = page_bytes(pages.specs, pages.page_size)
        cost = move_cost(pool.bytes_per_slot, page, parts.num_parameters, device.type)
        self.pages = PageAllocator(parts.num_pages, parts.page_size)
        paging = Paging(self.pages, cost)
        self.cache = make_cache(config, model, settled.weight_dtype, pool, parts.num_snapshots, pages, paging)
        if self.cache is not None:
            weakref.finalize(self, self.cache.tiers.close)
        self._reuse = None if self.cache is None else self.cache.reuse
        self.scheduler = Scheduler(self.limits, self.slots, self._release, self._reuse, paging)
        self._book = OutputBook(end_ids(parts), parts.tokenizer)
        self._counters = Counters()
        self._pipelined = device.type != "cpu"  # which has nothing to do while the host works
        self._ahead: Launched | None = None
        self._process = os.getpid()

    def add_request(
        self, request_id: str, prompt: PromptInput, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queue a request. Lower ``priority`` goes first.

        Raises:
            RequestError: it can't be served; nothing was queued.
            QueueFullError: ``max_queue_len`` requests wait already.
        """
        self.scheduler.check_queue()
        request = make_request(
            request_id,
            prompt,
            params or SamplingParams(),
            priority,
            tokenizer=self.tokenizer,
            vocab_size=self.runner.model.vocab_size,
            max_model_len=self.max_model_len,
        )
        answers = self.scheduler.add(request)
        try:
            self.runner.sampler.add(answers)
            self._book.open(request)
        except BaseException:  # queued whole or not at all
            self.scheduler.abort(request_id)
            raise

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests wherever they are; unknown ids are ignored.

        Slots are free at once; the final output, with ``finish_reason`` "abort", comes with the next step.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if self.scheduler.abort(request_id):
                self._book.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a call of :meth:`step` has something to do or to tell."""
        return self._book.num_open > 0

    def step(self) -> list[RequestOutput]:
        """Compute one step of everything that has room, and return what changed.

        Outputs are cumulative; each request has exactly one with ``finished``.

        Raises:
            RecurraError: in a process that was forked after the engine was made.
        """
        self._refuse_forked_process()
        launched = self._take_launched() or self._launch()
        if launched is not None:
            self._note_start(launched.plan)
            self._launch_ahead(launched)
            result = self.runner.finish(launched)
            ended = self._book.update(result)
            self._tell_reuse(result)
            self.scheduler.commit(launched.plan, result.tokens, ended, self.runner)
        return self._book.drain()

    def _tell_reuse(self, result: StepResult) -> None:
        """Which states can't be kept as they are."""
        if self._reuse is not None:
            self._reuse.distrust(result.failed)
            self._reuse.ran_ahead(() if self._ahead is None else self._ahead.plan.decode)

    def _release(self, sequence: Sequence) -> None:
        self.runner.release(sequence)
        if self._reuse is not None:
            self._reuse.forget(sequence)

    def _launch(self) -> Launched | None:
        plan = self.scheduler.schedule(self.runner)
        return self.runner.launch(plan) if plan else None

    def _launch_ahead(self, launched: Launched) -> None:
        """Queue the next step before this one is read, where it doesn't depend on what this one gives.

        The device then goes on while the host reads, writes text and answers its callers.
        """
        plan = self.scheduler.ahead(launched.plan) if self._pipelined else None
        self._ahead = None if plan is None else self.runner.launch_after(launched, plan)

    def _take_launched(self) -> Launched | None:
        """The step that was queued ahead, unless everybody in it has ended since."""
        launched, self._ahead = self._ahead, None
        if launched is None or all(s.status is Status.FINISHED for s in launched.plan.decode):
            return None
        return launched

    def _refuse_forked_process(self) -> None:
        """Operators' threads don't survive a fork; a step in the child would wait for them for ever."""
        if os.getpid() != self._process:
            raise RecurraError(
                f"this engine belongs to process {self._process} and can't run in its fork {os.getpid()}; "
                'make the engine in the child, or start it with multiprocessing\'s "spawn" method.'
            )

    def stats(self) -> EngineStats:
        """Load and counters."""
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_slots=self.slots.num_free,
            used_slots=self.slots.num_used,
            free_pages=self.pages.num_free,
            used_pages=self.pages.num_used,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=self._book.generated_tokens,
            steps=self._counters.steps,
            finished=dict(self._book.finish_reasons),
            errors=self._book.finish_reasons["error"],
            **cache_numbers(self.cache),
        )

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run everything that a request can reach once, so that nothing compiles after it."""
        if self._reuse is not None:
            self._reuse.active = False  # nothing real is said, and everything must be computed
        warm_up(self, progress)
        if self._reuse is not None:
            self._reuse.active = True

    def close(self) -> None:
        """Finish writing states and let go of their folder. The engine goes on, and keeps nothing there."""
        if self.cache is not None:
            self.cache.tiers.close()

    def reset_stats(self) -> None:
        """Start counting anew."""
        if self._reuse is not None:
            self._reuse.stats = ReuseStats()
        self._counters = Counters()
        self._book.reset_counts()

    def _note_start(self, plan: Plan) -> None:
        self._counters.steps += 1
        for chunk in plan.prefill:
            self._counters.prompt_tokens += chunk.length
            self._book.scheduled(chunk.sequence.request.request_id)
        for sequence in plan.decode:
            if sequence.num_computed < sequence.num_prompt:
                self._counters.prompt_tokens += 1
                self._book.scheduled(sequence.request.request_id)
        for request_id, tokens in self._reuse.take_hits() if self._reuse is not None else ():
            self._book.cached(request_id, tokens)


def _no_text(token_id: int) -> None:
    """Text of a token where there is no tokenizer."""
