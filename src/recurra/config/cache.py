"""Where states live, how many there are, and in which precision."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CacheSettings(BaseModel):
    """State keywords of ``LLM(...)``.

    Attributes:
        num_state_slots: sequences whose state is held at once; None: as many as ``max_num_seqs``, fewer
            if the memory is too small.
        enable_prefix_caching: reuse states of shared prompt beginnings.
        mamba_cache_dtype: precision of convolution windows; "auto" follows the activations.
        mamba_ssm_cache_dtype: precision of SSM states: float32, bfloat16, float16, fp8 or int8; "auto" follows
            the checkpoint's configuration, then float32.
        gpu_memory_utilization: share of the GPU's memory that weights and states may take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_state_slots: int | None = Field(default=None, ge=1)
    enable_prefix_caching: bool = False
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
