"""The settings of etcd discovery."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from dynamo_core.contracts.config import PluginConfig
from pydantic import Field, SecretStr, field_validator, model_validator

#: Where a member of a cluster listens if its address does not say.
DEFAULT_PORT = 2379


class TlsConfig(PluginConfig):
    """Encryption; a certificate that is not for the host of an endpoint is refused."""

    ca: Path | None = Field(
        default=None,
        description="Who may sign the servers' certificates besides the authorities of the system's list, a PEM file.",
    )
    cert: Path | None = Field(
        default=None, description="This process's certificate chain, a PEM file, for servers that ask for one."
    )
    key: Path | None = Field(default=None, description="The private key of `cert`, a PEM file without a passphrase.")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("`cert` and `key` belong together: set both or neither")
        return self


class EtcdConfig(PluginConfig):
    """Where the cluster is, how to log in, and how soon a silent process counts as dead. Times in seconds."""

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
    tls: TlsConfig | None = Field(default=None, description="Encryption; null means what https:// endpoints need.")
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
            raise ValueError("`username` and `password` belong together: set both or neither")
        plain = [endpoint for endpoint in self.endpoints if endpoint.startswith("http:")]
        if self.tls is not None and plain:
            raise ValueError(f"endpoints: {plain[0]!r} is not encrypted, and `tls` is set: write https://")
        if self.heartbeat is not None and self.heartbeat > self.ttl / 2:
            raise ValueError(f"heartbeat ({self.heartbeat:g} s) must be at most half of ttl ({self.ttl:g} s)")
        for name, seconds in (("poll", self.poll), ("timeout", self.timeout)):
            if seconds > self.ttl / 2:
                raise ValueError(f"{name} ({seconds:g} s) must be at most half of ttl ({self.ttl:g} s)")
        return self


def _address(text: str) -> str:
    """An address in full.

    Raises:
        ValueError: it is none, or holds what has a key of its own.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if "@" in parts.netloc:
        # Without the text: it holds what should not be shown.
        raise ValueError("holds a user or password, which would show in logs: set `username` and `password`")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    whole = parts.hostname and not (parts.path.strip("/") or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not whole:
        raise ValueError(f"{text!r} is neither http://host:port nor https://host:port")
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"
