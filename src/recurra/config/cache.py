"""Where states live, how many there are, and in which precision."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from recurra.errors import ConfigError


class CacheSettings(BaseModel):
    """State keywords of ``LLM(...)``.

    Attributes:
        num_state_slots: sequences whose state is held at once; None: as many as ``max_num_seqs``, fewer
            if the memory is too small.
        num_kv_pages: pages of keys and values of attention layers, all of them together; None: what fits.
        block_size: tokens of such a page, a power of two.
        enable_prefix_caching: reuse states of shared prompt beginnings.
        prefix_cache_bytes: device memory for kept states; None: half of what the slots leave, at most 1 GiB on a
            CPU.
        prefix_cache_host_bytes: host memory behind a GPU's; None: 4 GiB, 0: none.
        prefix_cache_dir: folder where states outlive the process; None: nowhere.
        prefix_cache_disk_bytes: most bytes of the files there.
        prefix_cache_interval: tokens between states that are kept inside a long prompt; 0: only where prompts end
            or part.
        mamba_cache_dtype: precision of convolution windows; "auto" follows the activations.
        mamba_ssm_cache_dtype: precision of SSM states: float32, bfloat16, float16, fp8 or int8; "auto" follows
            the checkpoint's configuration, then float32.
        gpu_memory_utilization: share of the GPU's memory that weights and states may take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_state_slots: int | None = Field(default=None, ge=1)
    num_kv_pages: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=64, ge=1, le=1024)
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int | None = Field(default=None, ge=1)
    prefix_cache_host_bytes: int | None = Field(default=None, ge=0)
    prefix_cache_dir: str | None = None
    prefix_cache_disk_bytes: int = Field(default=16 << 30, ge=1)
    prefix_cache_interval: int = Field(default=4096, ge=0)
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ConfigError("block_size", value, "not a power of two.", "Use 16, 64 or 256.")
        return value
