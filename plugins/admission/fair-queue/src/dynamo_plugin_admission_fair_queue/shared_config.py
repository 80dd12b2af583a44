"""The settings of limits that several frontends share."""

from __future__ import annotations

from dynamo_leases import check_times
from dynamo_redis import SharedCountSettings
from pydantic import Field, ValidationInfo, field_validator


class SharedConfig(SharedCountSettings):
    """The server where frontends share tenants' usage, and the interval. Times in seconds."""

    ttl: float = Field(
        default=3.0,
        ge=0.5,
        le=3600,
        description="Seconds of silence after which what a frontend has counts no more for the others.",
    )
    interval: float = Field(default=0.1, ge=0.01, le=10, description="Seconds from one look at the others to the next.")
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that connecting and asking the server may take, all together; null means a third of "
        "`ttl`, and one at most.",
    )

    # Of a whole section with a password no reason is shown: so this names the key.
    @field_validator("interval", "timeout")
    @classmethod
    def _fits_the_ttl(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "ttl" in info.data:
            check_times(info.data["ttl"], 2, **{str(info.field_name): value})
        return value

    @property
    def deadline(self) -> float:
        """Seconds that one exchange with the server may take."""
        return min(1.0, self.ttl / 3) if self.timeout is None else self.timeout
