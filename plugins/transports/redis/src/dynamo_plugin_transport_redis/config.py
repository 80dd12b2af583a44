"""The settings of the Redis transport."""

from __future__ import annotations

import re
from typing import ClassVar

from dynamo_redis import RedisSettings
from dynamo_wire.brokered import BrokeredConfig
from pydantic import Field, field_validator

_PREFIX = re.compile(r"[A-Za-z0-9_-]+([.:][A-Za-z0-9_-]+)*")


class RedisConfig(RedisSettings, BrokeredConfig):
    """The server's address and the login, beside the bounds of all brokers."""

    DATABASE_IN_URL: ClassVar[str] = "channels belong to none"

    prefix: str = Field(
        default="dynamo",
        max_length=128,
        description="What every channel begins with. Systems with different prefixes can share a server.",
    )

    @field_validator("prefix")
    @classmethod
    def _prefix_is_a_channel(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError("must be words of letters, digits, - and _, with dots or colons between them")
        return value
