"""From settings to a model in memory, in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from recurra.cache.pages import page_bytes
from recurra.cache.pool import slot_bytes
from recurra.cache.spec import paged, recurrent
from recurra.config.engine import EngineConfig
from recurra.config.pages import PagePlan, settle_memory
from recurra.config.scheduler import SchedulerLimits
from recurra.config.settle import ModelFacts, Settled, resolve, settle_slots, settle_snapshots
from recurra.device import Device, detect
from recurra.engine.generation import read_sampling_defaults, shown
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import ConfigError
from recurra.models import CausalLM, ModelConfig, load_model, read_config, skeleton
from recurra.ops import Ops, build
from recurra.rounding import NEAREST, Rounding, stochastic

log = logging.getLogger("recurra")

#: Called with what is going on, how much is done, and of how much.
Progress = Callable[[str, int, int], None]

#: Share of the free memory that states may take on a CPU, where others live too.
CPU_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of.

    Attributes:
        settled: the settings, nothing left to choose.
        limits: of the scheduler.
        num_slots: states that are held at once.
        model_config: the checkpoint's numbers.
        model: the weights, on the device.
        ops: the operators that the model was built with.
        tokenizer: None: token ids in and out.
        sampling_defaults: fields of ``SamplingParams`` that the checkpoint sets for callers who don't.
        num_snapshots: states that the device's memory keeps beside those that are at work.
        num_pages, page_size: pages of keys and values, and tokens of one; 0 in a model without attention.
        num_parameters: of the model.
    """

    settled: Settled
    limits: SchedulerLimits
    num_slots: int
    model_config: ModelConfig
    model: CausalLM
    ops: Ops
    tokenizer: Tokenizer | None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    num_snapshots: int = 0
    num_pages: int = 0
    page_size: int = 0
    num_parameters: int = 0


def load(config: EngineConfig, progress: Progress | None = None) -> Parts:
    """Check everything that needs no weights, then read them.

    Raises:
        ConfigError: a setting that can't work; raised before weights are read.
        CheckpointError: the folder can't be read or doesn't fit.
    """
    device = detect(config.device, config.num_threads)
    model_config = read_config(Path(config.model))
    # A context length in the checkpoint tells how it was trained; the recurrence has no limit there.
    facts = ModelFacts(model_config.torch_dtype, None, model_config.ssm_dtype)
    settled = resolve(config, facts, device)
    ops = build(device, settled.backend, settled.prefill_backend, settled.ssu_algorithm)
    tokenizer = load_tokenizer(config, model_config.vocab_size)
    defaults = read_sampling_defaults(config)
    if defaults:
        log.info(
            "sampling defaults of the model: %s (--generation-config none ignores them)", shown(defaults)
        )
    memory = fit(config, model_config, settled, ops)
    settled = replace(settled, max_model_len=memory.pages.max_model_len)
    memory.tell()
    torch.set_num_threads(device.num_threads)
    model = load_model(
        model_config,
        ops=ops,
        device=device.torch_device,
        weight_dtype=settled.weight_dtype,
        act_dtype=settled.act_dtype,
        conv_dtype=settled.conv_dtype,
        ssm_dtype=settled.ssm_dtype,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
    )
    return Parts(
        settled, memory.limits, memory.num_slots, model_config, model, ops, tokenizer, defaults,
        memory.num_snapshots, memory.pages.num_pages, memory.pages.page_size, memory.parameters,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """What goes beside the weights, and what it takes.

    Attributes:
        limits: of the scheduler.
        num_slots, num_snapshots: states at work, and states kept.
        pages: of keys and values, and the longest request.
        parameters, weight_bytes: of the model.
        slot_bytes: of one sequence's states.
        token_bytes: of one token's keys and values; 0 in a model without attention.
        free_bytes: what slots, pages and kept states may take together.
        plain_stack: the model is a stack of Mamba blocks, whose decode step can be one compiled call.
    """

    limits: SchedulerLimits
    num_slots: int
    num_snapshots: int
    pages: PagePlan
    parameters: int
    weight_bytes: int
    slot_bytes: int
    token_bytes: int
    free_bytes: int
    plain_stack: bool

    def tell(self) -> None:
        """Log what fits, and what would change that."""
        if self.pages.num_pages:
            tokens = self.pages.num_pages * self.pages.page_size
            log.info(
                "%d sequences at once (%.1f MiB of states each) and %d tokens of keys and values in %d pages "
                "(%.2f GiB); a request has up to %d tokens",
                self.limits.max_num_seqs, self.slot_bytes / 2**20, tokens, self.pages.num_pages,
                tokens * self.token_bytes / 2**30, self.pages.max_model_len,
            )  # fmt: skip
            return
        fit = self.free_bytes // self.slot_bytes - 1
        more = (
            "max_num_seqs"
            if fit > self.num_slots
            else "gpu_memory_utilization (or a narrower mamba_ssm_cache_dtype)"
        )
        log.info(
            "%d sequences at once (%.1f MiB of states each), %d states kept beside them; %d states fit in all: "
            "for more sequences raise %s",
            self.limits.max_num_seqs, self.slot_bytes / 2**20, self.num_snapshots, fit, more,
        )  # fmt: skip


def fit(config: EngineConfig, model_config: ModelConfig, settled: Settled, ops: Ops) -> Memory:
    """How many states and pages go beside the weights, counted before the weights are read.

    Raises:
        ConfigError: nothing fits, or a setting asks for more than fits.
    """
    bare = skeleton(
        model_config,
        ops=ops,
        weight_dtype=settled.weight_dtype,
        act_dtype=settled.act_dtype,
        conv_dtype=settled.conv_dtype,
        ssm_dtype=settled.ssm_dtype,
    )
    weights = {id(p): p for p in bare.parameters()}.values()
    weight_bytes = sum(p.numel() * p.element_size() for p in weights)
    free = free_state_bytes(settled.device, config.gpu_memory_utilization, weight_bytes)
    size = slot_bytes(recurrent(bare.state_specs))
    token = page_bytes(paged(bare.state_specs), 1)
    if token:
        limits, num_slots, pages = settle_memory(
            config, settled.device, size, token, free, model_config.max_length
        )
    else:
        limits, num_slots = settle_slots(config, settled.device, size, free)
        pages = PagePlan(0, 0, settled.max_model_len)
    taken = (num_slots + 1) * size + (pages.num_pages + 1) * pages.page_size * token
    snapshots = settle_snapshots(config, settled.device, size, free - taken)
    parameters, stack = sum(p.numel() for p in weights), bare.stack_weights() is not None
    return Memory(limits, num_slots, snapshots, pages, parameters, weight_bytes, size, token, free, stack)


def state_rounding(settled: Settled, seed: int) -> Rounding:
    """How states are rounded; a run with the same seed and the same steps draws the same."""
    if not settled.stochastic_rounding:
        return NEAREST
    return stochastic(seed, settled.device.torch_device, settled.philox_rounds)


def load_tokenizer(config: EngineConfig, vocab_size: int) -> Tokenizer | None:
    """The tokenizer, if there is one and it is wanted."""
    if config.skip_tokenizer_init:
        return None
    folder = Path(config.tokenizer or config.model)
    tokenizer = Tokenizer.from_folder(folder, chat_template=config.chat_template, model_path=config.model)
    if tokenizer is None and config.tokenizer is not None:
        raise ConfigError(
            "tokenizer", config.tokenizer, "there is no tokenizer.json.",
            "Give a folder that has one, or skip_tokenizer_init=True.",
        )  # fmt: skip
    if tokenizer is not None:
        tokenizer.check_vocab(vocab_size)
    return tokenizer


def end_ids(parts: Parts) -> frozenset[int]:
    """Tokens that end an answer: those that the tokenizer and generation_config.json name.

    config.json speaks only where neither does: its ids are often a class's default, of another
    vocabulary. Such ids that the model doesn't even have end nothing.
    """
    named = parts.tokenizer.eos_token_ids if parts.tokenizer is not None else ()
    found = named or parts.model_config.eos_token_ids
    return frozenset(token for token in found if 0 <= token < parts.model.vocab_size)


def free_state_bytes(device: Device, gpu_memory_utilization: float, weight_bytes: int) -> int:
    """Bytes that states may take once ``weight_bytes`` of weights are in place."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.index)
        return int(free - weight_bytes - (1.0 - gpu_memory_utilization) * total)
    return int((_available_memory() - weight_bytes) * CPU_SHARE)


def _available_memory() -> int:
    """Bytes that can be had without swapping; 4 GiB where the system doesn't say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
