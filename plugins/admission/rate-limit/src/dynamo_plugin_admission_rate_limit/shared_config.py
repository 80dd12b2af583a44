"""The settings of limits that several frontends share."""

from __future__ import annotations

from typing import Literal

from dynamo_leases import check_times
from dynamo_redis import SharedCountSettings
from pydantic import Field, ValidationInfo, field_validator


class SharedConfig(SharedCountSettings):
    """The server that counts for all frontends, and what happens without it. Times in seconds."""

    on_outage: Literal["local", "allow", "refuse"] = Field(
        default="local",
        description="While the server does not answer: each frontend keeps the limits for itself (`local`), or admits "
        "every request (`allow`), or none (`refuse`).",
    )
    ttl: float = Field(
        default=3.0,
        ge=0.5,
        le=3600,
        description="Seconds of silence after which the concurrent requests of a frontend no longer count.",
    )
    timeout: float = Field(
        default=0.5, gt=0, le=10, description="Seconds that connecting and asking the server may take, all together."
    )

    @field_validator("timeout")
    @classmethod
    def _fits_the_ttl(cls, value: float, info: ValidationInfo) -> float:
        if "ttl" in info.data:
            check_times(info.data["ttl"], 2, timeout=value)
        return value
