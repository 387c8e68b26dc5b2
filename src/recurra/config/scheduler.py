"""How many requests run at once, how many tokens a step computes, and how long a request may be."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

#: Default longest request. A recurrent state has one size whatever its history, so this limits only
#: the patience of the caller; positions are counted in 64 bits.
DEFAULT_MAX_MODEL_LEN = 1 << 20


class SchedulerSettings(BaseModel):
    """Scheduling keywords of ``LLM(...)``; None asks :func:`recurra.config.settle.resolve` to choose.

    Attributes:
        max_model_len: most tokens of one request, prompt and answer.
        max_num_seqs: most sequences computed in one step.
        max_num_batched_tokens: most tokens computed in one step, decode rows included.
        max_queue_len: most requests that wait; one more raises QueueFullError. None: no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_queue_len: int | None = Field(default=None, ge=0)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler obeys: every number settled.

    Attributes:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
        max_queue_len: requests waiting; None: no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int | None = None
