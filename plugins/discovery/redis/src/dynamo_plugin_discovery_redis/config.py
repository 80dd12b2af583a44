"""The settings of Redis discovery."""

from __future__ import annotations

from typing import Self

from dynamo_leases import check_times
from dynamo_redis import RedisSettings
from pydantic import Field, model_validator


class RedisConfig(RedisSettings):
    """The server's address, the login, and the time until a silent process counts as dead. Times in seconds."""

    database: int = Field(default=0, ge=0, description="The number of the database.")
    prefix: str = Field(
        default="dynamo",
        min_length=1,
        max_length=128,
        description="What every key begins with. Systems with different prefixes can share a server.",
    )
    ttl: float = Field(
        default=5.0, ge=0.1, le=3600, description="Seconds without a heartbeat after which a process counts as dead."
    )
    heartbeat: float | None = Field(
        default=None, gt=0, description="Seconds between two heartbeats; null means a third of `ttl`."
    )
    poll: float = Field(
        default=0.5, gt=0, description="Seconds between two looks for processes that died, or for a missed change."
    )
    timeout: float = Field(default=1.5, gt=0, description="How long connecting, or one answer of the server, may take.")
    start_timeout: float = Field(
        default=30.0, ge=0, description="How long a starting process waits for a server that is not there yet."
    )
    lost_after: float = Field(
        default=60.0,
        gt=0,
        description="How long a server that is there may refuse a lease before the process gives up.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_times(self.ttl, 2, heartbeat=self.heartbeat, poll=self.poll, timeout=self.timeout)
        return self
