"""The nouns of the system and their invariants.

Shapes follow ``docs/shapes.md``: T tokens packed in a step, S sequences in a step. Torch is named
for type checkers only, so that the scheduler and its tests need none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from recurra.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]

#: Row of the state pool that belongs to nobody: padding reads and writes it, and nothing else does.
SCRATCH_SLOT = 0
#: Page of keys and values that belongs to nobody, likewise.
SCRATCH_PAGE = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue ``params.n`` times."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0  # lower goes first; ties go by arrival
    arrival_time: float = field(default_factory=time.monotonic)
    cache_salt: str | None = None  # kept states are shared among requests of the same salt only

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "an empty prompt is refused before a Request exists"


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request: its tokens, how many are computed, and the slot it holds.

    ``0 <= num_computed <= len(token_ids)``; while it decodes exactly one token is not computed.
    """

    request: Request
    index: int  # which of the request's n answers
    token_ids: list[int]  # prompt, then answer
    num_computed: int = 0
    slot: int = SCRATCH_SLOT
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list)  # of keys and values, in the order of positions

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def check(self) -> None:
        """Assert the invariants; called by the scheduler after each commit."""
        assert 0 <= self.num_computed <= len(self.token_ids), (
            self.num_computed,
            len(self.token_ids),
        )
        assert (self.slot != SCRATCH_SLOT) == (self.status is Status.RUNNING), (
            self.slot,
            self.status,
        )
        assert self.status is Status.RUNNING or not self.pages, (self.status, self.pages)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Kernel chunks of the packed prefill tokens; none crosses a sequence boundary.

    Each sequence is cut from *its own* first token into pieces of ``size``, the last one shorter, so
    that the decay of a carried state is always measured from a chunk's start.

    Attributes:
        size: largest chunk, in tokens.
        seq: (chunks,) int32, which prefill sequence the chunk belongs to.
        start: (chunks,) int32, its first token, counted in the packed prefill tokens.
        length: (chunks,) int32, its tokens, 1 to ``size``.
        cu_chunks: (S + 1,) int32, chunks before each sequence.
    """

    size: int
    seq: Tensor
    start: Tensor
    length: Tensor
    cu_chunks: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything a model needs for one step, on the device: decode rows first, then packed prefill.

    No field is optional: what is absent is an empty tensor.

    Attributes:
        token_ids: (T,) int64. The first ``num_decode`` are one token of each decoding sequence.
        positions: (T,) int64, index of each token in its own sequence.
        slots: (num_decode + S,) int32, state-pool rows; ``SCRATCH_SLOT`` marks padding rows.
        num_decode: decode rows.
        cu_seqlens: (S + 1,) int32, bounds of the prefill sequences, counted from the first prefill token.
        has_state: (S,) bool, whether the prefill sequence continues from its slot's content. Where
            False the content is somebody else's (perhaps NaN) and must never be read.
        max_seqlen: longest prefill sequence of the step (0 when there is none).
        chunks: kernel chunks of the prefill tokens.
        logit_rows: (R,) int64, the rows of T whose logits are wanted.
        page_table: (num_decode + S, pages) int32, pages of keys and values of each sequence in the order of
            positions; ``SCRATCH_PAGE`` beyond its last. No columns in a model without attention.
        context_lens: (num_decode + S,) int32, tokens of each sequence up to and with this step's; 0 in
            padding rows.
        kv_rows: (T,) int64, where each token's key and value are stored: page * page size + place in it.
        max_context: largest of ``context_lens``.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    num_decode: int
    cu_seqlens: Tensor
    has_state: Tensor
    max_seqlen: int
    chunks: Chunks
    logit_rows: Tensor
    page_table: Tensor
    context_lens: Tensor
    kv_rows: Tensor
    max_context: int

    @property
    def decode_slots(self) -> Tensor:
        return self.slots[: self.num_decode]

    @property
    def prefill_slots(self) -> Tensor:
        return self.slots[self.num_decode :]

    @property
    def decode_pages(self) -> Tensor:
        return self.page_table[: self.num_decode]

    @property
    def prefill_pages(self) -> Tensor:
        return self.page_table[self.num_decode :]

    @property
    def num_prefill_tokens(self) -> int:
        return self.token_ids.shape[0] - self.num_decode


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


#: The candidates at one position: token id to its Logprob.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers, so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None  # why, when finish_reason is "error"

    def tokens_after(self, count: int) -> list[int]:
        """``token_ids[count:]``, at the cost of what it returns even while the answer grows."""
        return self.token_ids[count:]

    def logprobs_after(self, count: int) -> list[PositionLogprobs] | None:
        """``logprobs[count:]``, likewise."""
        return None if self.logprobs is None else self.logprobs[count:]


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock of the engine process; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's answers so far; ``finished`` when all n are done."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


#: What callers may hand over as a prompt.
PromptInput = str | list[int] | dict[str, Any]
