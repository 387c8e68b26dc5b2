"""Which backend runs the recurrent operators, and how states are rounded."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from recurra.errors import ConfigError

MambaSSUAlgorithm = Literal["auto", "simple", "vertical", "horizontal"]


class _MambaBackendEnumMeta(EnumMeta):
    """Turns an unknown name into an error that lists the valid ones."""

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            valid = ", ".join(member.name.lower() for member in cls)  # type: ignore[var-annotated]
            raise ConfigError("mamba backend", name, "unknown.", f"Valid: {valid}.") from None


class MambaBackendEnum(Enum, metaclass=_MambaBackendEnumMeta):
    """Backends of the selective state update and the scans."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CPU = "cpu"
    REFERENCE = "reference"


class MambaConfig(BaseModel):
    """Configuration of the Mamba operators (names and meanings are vLLM's).

    Attributes:
        backend: backend of the operators; None is resolved from the device.
        prefill_backend: backend of the prefill scans; None follows ``backend``.
        ssu_algorithm: algorithm of the FlashInfer backend; an error with another backend.
        enable_stochastic_rounding: round states that are stored in 16 or 8 bits stochastically.
        stochastic_rounding_philox_rounds: rounds of the generator; 0 is the backend's default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: MambaBackendEnum | None = None
    prefill_backend: MambaBackendEnum | None = None
    ssu_algorithm: MambaSSUAlgorithm | None = None
    enable_stochastic_rounding: bool = False
    stochastic_rounding_philox_rounds: int = 0

    @field_validator("backend", "prefill_backend", mode="before")
    @classmethod
    def validate_backend_before(cls, value: Any) -> Any:
        """Accept the enum or its name in any case."""
        return MambaBackendEnum[value.upper()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> MambaConfig:
        if self.ssu_algorithm is not None and self.backend is not MambaBackendEnum.FLASHINFER:
            raise ConfigError(
                "ssu_algorithm", self.ssu_algorithm, "only the flashinfer backend has algorithms.",
                "Leave it out, or set backend='flashinfer'.",
            )  # fmt: skip
        if not 0 <= self.stochastic_rounding_philox_rounds <= 10:
            raise ConfigError(
                "stochastic_rounding_philox_rounds", self.stochastic_rounding_philox_rounds,
                "out of range.", "Use 0 (default) to 10.",
            )  # fmt: skip
        return self
