"""The settings of etcd discovery."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from dynamo_core import ClientTls, PluginConfig, SettingsMismatch
from dynamo_leases import check_times
from pydantic import Field, SecretStr, field_validator, model_validator

#: Where a member of a cluster listens if its address does not say.
DEFAULT_PORT = 2379


class EtcdConfig(PluginConfig):
    """The cluster's address, the login, and the time until a silent process counts as dead. Times in seconds."""

    endpoints: tuple[str, ...] = Field(
        default=(f"http://127.0.0.1:{DEFAULT_PORT}",),
        min_length=1,
        max_length=16,
        description="Members of one cluster, as http:// or https://host:port; the next serves if one does not.",
    )
    username: str | None = Field(default=None, min_length=1, description="Log in as this user; needs `password`.")
    password: SecretStr | None = Field(default=None, description="Log in with this password; needs `username`.")
    prefix: str = Field(
        default="dynamo",
        min_length=1,
        max_length=128,
        description="What every key begins with, before a slash. Systems with different prefixes can share a cluster.",
    )
    tls: ClientTls | None = Field(default=None, description="Encryption; null means what https:// endpoints need.")
    ttl: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="Seconds without a heartbeat after which a process counts as dead; etcd rounds up to full seconds.",
    )
    heartbeat: float | None = Field(
        default=None, gt=0, description="Seconds between two heartbeats; null means a third of `ttl`."
    )
    poll: float = Field(
        default=2.0, gt=0, description="Seconds between two checks that changes still arrive, and between retries."
    )
    timeout: float = Field(default=2.0, gt=0, description="How long connecting, or one answer of a server, may take.")
    start_timeout: float = Field(
        default=120.0, ge=0, description="How long a starting process waits for a cluster that is not there yet."
    )
    lost_after: float = Field(
        default=60.0,
        gt=0,
        description="How long a cluster that is there may refuse a lease before the process gives up.",
    )

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(_address, value)))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise SettingsMismatch("`username` and `password` belong together: set both or neither")
        plain = [endpoint for endpoint in self.endpoints if endpoint.startswith("http:")]
        if self.tls is not None and plain:
            raise ValueError(f"endpoints: {plain[0]!r} is not encrypted, and `tls` is set: write https://")
        check_times(self.ttl, 2, heartbeat=self.heartbeat, poll=self.poll, timeout=self.timeout)
        return self


def _address(text: str) -> str:
    """Return an address in full.

    Raises:
        ValueError: it is none, or holds what has a key of its own.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if "@" in text:
        # Without the text: it holds what should not be shown.
        raise SettingsMismatch("holds a user or password, which would show in logs: set `username` and `password`")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    whole = parts.hostname and not (parts.path.strip("/") or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not whole:
        raise ValueError(f"{text!r} is neither http://host:port nor https://host:port")
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"
