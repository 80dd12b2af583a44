"""The settings of the TCP transport."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from dynamo_core import ClientTls, PluginConfig, SettingsMismatch
from pydantic import Field, SecretStr, field_validator, model_validator

from dynamo_plugin_transport_tcp.address import is_address, is_loopback, is_unspecified, split_host_port
from dynamo_plugin_transport_tcp.outbound_allowlist import AllowedNetworks

#: A shorter secret could be guessed by an attacker who has recorded one handshake.
SHORTEST_SECRET = 16

#: Seconds that a caller may be silent where `silence` is not set, and after which it is asked for life: nothing waits
#: for a caller but what it has called, so there is no hurry.
CALLERS_SILENCE = 60.0
CALLERS_HEARTBEAT = 5.0


class TcpTls(ClientTls):
    """Encryption. The same certificate is shown to callers and, where workers ask for one, to workers."""

    cert: Path = Field(description="This process's certificate chain, a PEM file.")
    key: Path = Field(description="The private key of `cert`, a PEM file without a passphrase.")
    ca: Path | None = Field(
        default=None, description="Who may sign the certificates of workers, a PEM file; null means the system's list."
    )
    client_ca: Path | None = Field(
        default=None,
        description="Who may sign the certificates of callers, a PEM file. If set, callers must show one (mTLS).",
    )
    server_name: str | None = Field(
        default=None, description="The name that workers' certificates bear; null means the host of their address."
    )


class TcpConfig(PluginConfig):
    """The address to listen on, the trusted peers, and the limits of connections. Times in seconds."""

    bind: str = Field(default="127.0.0.1:0", description="Where workers listen, as host:port; port 0 is any free port.")
    advertise: str | None = Field(
        default=None, description="What workers publish instead of the bound address: a host, or host:port."
    )
    secret: SecretStr | None = Field(
        default=None,
        description=f"Known to all processes, proven by both ends; {SHORTEST_SECRET} characters or more.",
    )
    tls: TcpTls | None = Field(default=None, description="Encryption; null means none.")
    insecure: bool = Field(
        default=False, description="Allows an address that others reach without `secret` or `tls.client_ca`."
    )
    checksum: bool = Field(
        default=True,
        description="Whether messages carry a checksum, so that what a network changes ends the connection; with `tls` "
        "they have a better one and do without.",
    )
    max_frame_mb: int = Field(
        default=32, ge=1, le=1024, description="The largest message in MiB; a longer one closes the connection."
    )
    connect_timeout: float = Field(
        default=5.0, gt=0, description="How long connecting may take, handshake included, seen from either end."
    )
    accept_timeout: float = Field(default=5.0, gt=0, description="How long a worker may take to accept a call.")
    heartbeat: float = Field(
        default=1.0, gt=0, description="A connection with open calls that was silent this long is asked for life."
    )
    silence: float | None = Field(
        default=None,
        gt=0,
        description="A connection that was silent this long is given up, unless a thread of the worker says that its "
        f"event loop is busy; null means the life of the worker's lease and a second, and {CALLERS_SILENCE:g} for what "
        "workers allow callers.",
    )
    idle_timeout: float = Field(
        default=300.0, gt=0, description="A caller's connection without calls and subscriptions is closed after this."
    )
    write_stall: float = Field(
        default=30.0, gt=0, description="A connection whose other end reads nothing for this long is cut."
    )
    write_high_water_kb: int = Field(
        default=256, ge=1, description="KiB that may wait on one connection before its calls have to wait too."
    )
    allowed_networks: tuple[str, ...] | None = Field(
        default=None,
        description="Networks of workers that are connected to, such as 203.0.113.0/24; a worker whose record names an "
        "address outside is not. Null means private, loopback and link-local ones and those that the machine is in.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Callers that a worker process lets in; one more takes the place of one without calls.",
    )
    max_silent: int = Field(
        default=128,
        ge=1,
        description="Connections that may wait without having shown that they know the worker; the oldest makes room.",
    )
    max_streams: int = Field(default=10_000, ge=1, description="Calls that may run on one connection.")
    event_backlog: int = Field(
        default=10_000, ge=1, description="Events that may wait for one subscriber, at either end; more are dropped."
    )

    @field_validator("bind")
    @classmethod
    def _bind_has_a_port(cls, value: str) -> str:
        if split_host_port(value)[1] is None:
            raise ValueError("has no port; write host:port, with port 0 for any free one")
        return value

    @field_validator("advertise")
    @classmethod
    def _advertise_is_a_place(cls, value: str | None) -> str | None:
        if value is not None and split_host_port(value)[1] == 0:
            raise ValueError("port 0 cannot be reached; leave the port out to publish the bound one")
        return value

    @field_validator("allowed_networks")
    @classmethod
    def _networks_are_networks(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in value or ():
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is not a network such as 203.0.113.0/24: {error}") from None
        return value

    @field_validator("secret")
    @classmethod
    def _secret_is_long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < SHORTEST_SECRET:
            raise ValueError(f"has fewer than {SHORTEST_SECRET} characters; make one with: openssl rand -hex 32")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        host, _ = split_host_port(self.bind)
        trusted = self.secret is not None or (self.tls is not None and self.tls.client_ca is not None)
        if not (is_loopback(host) or trusted or self.insecure):
            raise ValueError(
                f"bind {self.bind!r} is reached by others, who could then call workers: set `secret` or "
                "`tls.client_ca`, or bind to 127.0.0.1, or allow it with `insecure: true`"
            )
        if self.silence is not None and self.silence < 2 * self.heartbeat:
            raise SettingsMismatch("`silence` must be at least twice `heartbeat`")
        return self

    def remarks(self) -> list[str]:
        host, _ = split_host_port(self.advertise or self.bind)
        if not is_address(host) or is_unspecified(host) or AllowedNetworks(self.allowed_networks).allow(host):
            return []
        return [
            f"workers are reached at {host}, outside of `allowed_networks`: frontends with these settings do not "
            f'connect to them; add a network that holds it, such as "{ipaddress.ip_network(host)}"'
        ]

    @property
    def checksums(self) -> bool:
        """Whether frames are to have checksums."""
        return self.checksum and self.tls is None

    @property
    def callers_silence(self) -> float:
        """Seconds that a connection without calls may be silent, and one at the listening end."""
        return CALLERS_SILENCE if self.silence is None else self.silence

    @property
    def callers_heartbeat(self) -> float:
        """Seconds of silence after which such a connection is asked for life."""
        return max(self.heartbeat, CALLERS_HEARTBEAT) if self.silence is None else self.heartbeat

    @property
    def max_frame(self) -> int:
        """The largest frame in bytes."""
        return self.max_frame_mb * 1024 * 1024

    @property
    def write_high_water(self) -> int:
        """Bytes that may wait on one connection."""
        return self.write_high_water_kb * 1024

    @property
    def secret_bytes(self) -> bytes | None:
        """The secret as it is used for proofs."""
        return None if self.secret is None else self.secret.get_secret_value().encode()
