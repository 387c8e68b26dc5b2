"""``recurra explain``: which backend runs each operator, why, and what a model costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from recurra.cli.console import stdout, write
from recurra.cli.failure import OK
from recurra.cli.flags import engine_flags, switch, takes
from recurra.cli.running import engine_config, show_warnings

if TYPE_CHECKING:
    from recurra.config.engine import EngineConfig
    from recurra.config.settle import Settled
    from recurra.device import Device
    from recurra.models import ModelConfig
    from recurra.ops import Ops


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a checkpoint takes on a device.

    Attributes:
        architecture, layers, hidden_size, vocab_size, parameters: of the model.
        weight_dtype, state_dtype: as they will be held.
        weight_bytes: of all weights.
        state_bytes: one sequence's states, over all layers, aligned as in the pool.
        free_bytes: what states may take once the weights are in place.
        sequences: how many states fit in that.
        token_bytes: one token's keys and values, over all attention layers; 0 in a model without attention.
        num_kv_pages, block_size: pages of keys and values that the engine would settle on, and tokens of one.
        num_state_slots, max_num_seqs, max_model_len: what the engine would settle on.
        tokenizer, chat_template: whether the folder has them.
        sampling_defaults: what its generation_config.json sets for requests that don't.
    """

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    parameters: int
    weight_dtype: str
    state_dtype: str
    weight_bytes: int
    state_bytes: int
    free_bytes: int
    sequences: int
    token_bytes: int
    num_kv_pages: int
    block_size: int
    num_state_slots: int
    max_num_seqs: int
    max_model_len: int
    tokenizer: bool
    chat_template: bool
    sampling_defaults: dict[str, Any]
    decode_step: str


_WITHOUT_MODEL = "no model"


@takes(engine=engine_flags(("seed", "load_format", "max_queue_len")))
def explain(
    model: Annotated[
        str | None, Parameter(help="Checkpoint folder; without one, the operators alone")
    ] = None,
    *,
    as_json: Annotated[bool, switch("--json")] = False,
    engine: dict[str, Any],
) -> int:
    """Show which backend runs each operator, why each other was not chosen, and what a model costs.

    Weights are not read.

    Args:
        as_json: Print one JSON object instead of tables.
    """
    from recurra.config.engine import EngineConfig
    from recurra.device import detect

    show_warnings(quiet=True)
    config = (
        engine_config(model, engine) if model is not None else EngineConfig(model=_WITHOUT_MODEL, **engine)
    )
    device = detect(config.device, config.num_threads)
    ops, cost = _model(config, device) if model is not None else (_operators(config, device), None)
    if as_json:
        record = {
            "device": asdict(device),
            "operators": [asdict(choice) for choice in ops.choices],
            "model": None if cost is None else asdict(cost),
        }
        write(json.dumps(record, indent=2) + "\n")
        return OK
    _print(device, ops, cost)
    return OK


def _operators(config: EngineConfig, device: Device) -> Ops:
    from recurra.config.settle import ModelFacts, resolve
    from recurra.ops import build

    settled = resolve(config, ModelFacts(None, None), device)
    return build(device, settled.backend, settled.prefill_backend, settled.ssu_algorithm)


def _model(config: EngineConfig, device: Device) -> tuple[Ops, ModelCost]:
    """Operators and cost of a checkpoint, from its configuration alone."""
    from pathlib import Path

    from recurra.config.settle import ModelFacts, resolve
    from recurra.engine.loading import load_tokenizer
    from recurra.models import read_config
    from recurra.ops import build

    facts = read_config(Path(config.model))
    settled = resolve(config, ModelFacts(facts.torch_dtype, None, facts.ssm_dtype), device)
    ops = build(device, settled.backend, settled.prefill_backend, settled.ssu_algorithm)
    tokenizer = load_tokenizer(config, facts.vocab_size)
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    return ops, _cost(config, facts, settled, ops, tokenizer is not None, has_template)


def _cost(
    config: EngineConfig, facts: ModelConfig, settled: Settled, ops: Ops, tokenizer: bool, chat_template: bool
) -> ModelCost:
    from recurra.engine.generation import read_sampling_defaults
    from recurra.engine.loading import fit

    memory = fit(config, facts, settled, ops)
    return ModelCost(
        architecture=facts.architecture,
        layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        parameters=memory.parameters,
        weight_dtype=_name(settled.weight_dtype),
        state_dtype=_name(settled.ssm_dtype),
        weight_bytes=memory.weight_bytes,
        state_bytes=memory.slot_bytes,
        free_bytes=memory.free_bytes,
        sequences=memory.free_bytes // memory.slot_bytes - 1,  # one row is the scratch slot
        token_bytes=memory.token_bytes,
        num_kv_pages=memory.pages.num_pages,
        block_size=memory.pages.page_size,
        num_state_slots=memory.num_slots,
        max_num_seqs=memory.limits.max_num_seqs,
        max_model_len=memory.pages.max_model_len,
        tokenizer=tokenizer,
        chat_template=chat_template,
        sampling_defaults=read_sampling_defaults(config),
        decode_step=_decode_step(config, ops, memory.plain_stack),
    )


def _decode_step(config: EngineConfig, ops: Ops, plain_stack: bool) -> str:
    """How a step of one token a sequence is run where there are no CUDA graphs."""
    if ops.build_decode_stack is None:
        return "operator by operator: no backend here offers build_decode_stack"
    if config.enforce_eager:
        return "operator by operator: enforce_eager"
    if not plain_stack:
        return "operator by operator: build_decode_stack serves stacks of Mamba blocks alone"
    return "one compiled call"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _print(device: Device, ops: Ops, cost: ModelCost | None) -> None:
    console = stdout()
    console.print(f"Device: {device.type} ({device.name}), {device.num_threads} threads", highlight=False)
    console.print(_backends(device))
    console.print(_choices(device, ops))
    if cost is not None:
        console.print(_summary(cost))


def _backends(device: Device) -> Table:
    """Backends in order of preference, and which the device refuses."""
    from recurra.ops import BACKENDS
    from recurra.ops.registry import refusal

    table = Table("backend", "on this device", title="Backends, in order of preference", title_justify="left")
    for backend in BACKENDS:
        reason = refusal(backend, device)
        table.add_row(backend, "usable" if reason is None else f"refused: {reason}")
    return table


def _choices(device: Device, ops: Ops) -> Table:
    """The backend of each operator, and why each one before it was passed over."""
    from recurra.ops.registry import refusal

    table = Table("operator", "chosen", "passed over", title="Operators", title_justify="left")
    for choice in ops.choices:
        refused = [backend for backend in choice.refused if refusal(backend, device) is not None]
        reasons = [f"{', '.join(refused)}: refused, see above"] if refused else []
        reasons += [f"{name}: {why}" for name, why in choice.refused.items() if name not in refused]
        table.add_row(choice.operator, choice.backend, "\n".join(reasons) or "nothing")
    return table


def _summary(cost: ModelCost) -> Table:
    from recurra.engine.generation import shown

    summary = Table("model", "", show_header=False, title="Model", title_justify="left")
    rows = {
        "architecture": cost.architecture,
        "size": f"{cost.layers} layers, width {cost.hidden_size}, vocabulary {cost.vocab_size}, "
        f"{cost.parameters:,} parameters",
        "weights": f"{cost.weight_dtype}, {_size(cost.weight_bytes)}",
        "state of a sequence": f"{_size(cost.state_bytes)} ({cost.state_dtype}), the same at any length",
        "keys and values": "none: no attention"
        if not cost.num_kv_pages
        else f"{_size(cost.token_bytes)} a token; "
        f"{cost.num_kv_pages:,} pages of {cost.block_size} hold {cost.num_kv_pages * cost.block_size:,} tokens in "
        f"{_size(cost.num_kv_pages * cost.block_size * cost.token_bytes)}",
        "sequences that fit": f"{cost.sequences:,} states in {_size(cost.free_bytes)} of free memory",
        "the engine takes": f"{cost.num_state_slots} slots, {cost.max_num_seqs} sequences a step, "
        f"requests of up to {cost.max_model_len:,} tokens",
        "decode step": cost.decode_step,
        "tokenizer": "yes" if cost.tokenizer else "none: token ids in and out",
        "chat template": "yes" if cost.chat_template else "none: give --chat-template to chat",
        "sampling defaults": shown(cost.sampling_defaults) or "none of its own",
    }
    for name, text in rows.items():
        summary.add_row(name, text)
    return summary
