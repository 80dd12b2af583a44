"""The settings of Redis discovery."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from dynamo_core.certificates import ClientTls
from dynamo_core.contracts.config import PluginConfig, SettingsMismatch
from dynamo_leases.times import check_times
from pydantic import Field, SecretStr, field_validator, model_validator

#: Where a server listens if its address does not say.
DEFAULT_PORT = 6379

#: The schemes of addresses, and whether they mean encryption.
SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}


class RedisConfig(PluginConfig):
    """Where the server is, how to log in, and how soon a silent process counts as dead. Times in seconds."""

    url: str = Field(
        default="redis://127.0.0.1:6379",
        description="The server, as redis://host:port, or rediss://host:port with TLS.",
    )
    username: str | None = Field(default=None, description="Log in as this user; null means the default user.")
    password: SecretStr | None = Field(default=None, description="Log in with this password.")
    database: int = Field(default=0, ge=0, description="The number of the database.")
    prefix: str = Field(
        default="dynamo",
        min_length=1,
        max_length=128,
        description="What every key begins with. Systems with different prefixes can share a server.",
    )
    tls: ClientTls | None = Field(default=None, description="Encryption; null means none, unless `url` has rediss://.")
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

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        return _address(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.username is not None and self.password is None:
            raise SettingsMismatch("`username` needs a `password`")
        check_times(self.ttl, 2, heartbeat=self.heartbeat, poll=self.poll, timeout=self.timeout)
        return self

    @property
    def host(self) -> str:
        """The host of the server."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port of the server."""
        return urlsplit(self.url).port or DEFAULT_PORT

    @property
    def wants_tls(self) -> bool:
        """Whether connections must be encrypted."""
        return self.tls is not None or SCHEMES[urlsplit(self.url).scheme]


def _address(text: str) -> str:
    """An address in full.

    Raises:
        ValueError: it is none, or holds what has a key of its own.
    """
    parts = urlsplit(text if "://" in text else f"redis://{text}")
    if "@" in text:
        # Without the text: it holds what should not be shown.
        raise SettingsMismatch("holds a user or password, which would show in logs: set `username` and `password`")
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{text!r} is neither redis://host:port nor rediss://host:port")
    if parts.path.strip("/"):
        raise ValueError(f"{text!r} names a database: set `database`")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    if not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not redis://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"
