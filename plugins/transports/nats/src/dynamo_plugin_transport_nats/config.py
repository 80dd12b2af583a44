"""The settings of the NATS transport."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from dynamo_core import ClientTls, SettingsMismatch
from dynamo_wire.brokered import BrokeredConfig
from pydantic import Field, SecretStr, field_validator, model_validator

#: Where a server listens if its address does not say.
DEFAULT_PORT = 4222

_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class NatsTls(ClientTls):
    """Encryption. Nothing secret is sent before it is in force; a server that does not offer it is refused."""

    ca: Path | None = Field(
        default=None, description="Who may sign the server's certificate, a PEM file; null means the system's list."
    )
    server_name: str | None = Field(
        default=None, description="The name that the servers' certificates bear; null means the host of the address."
    )


class NatsConfig(BrokeredConfig):
    """The servers' addresses, the login, and the bounds of unread data, beside the bounds of all brokers."""

    servers: list[str] = Field(
        default=["nats://127.0.0.1:4222"],
        min_length=1,
        description="The servers of one cluster, as nats://host:port or tls://host:port; any of them will do.",
    )
    prefix: str = Field(
        default="dynamo",
        max_length=128,
        description="What every subject begins with. Systems with different prefixes can share a server.",
    )
    user: str | None = Field(default=None, description="Log in with this name and `password`.")
    password: SecretStr | None = Field(default=None, description="The password of `user`.")
    token: SecretStr | None = Field(default=None, description="Log in with a token.")
    nkey: SecretStr | None = Field(default=None, description="Log in with a key: its seed, which begins with SU.")
    credentials: Path | None = Field(default=None, description="Log in with a `.creds` file.")
    tls: NatsTls | None = Field(
        default=None, description="Encryption; null means none, unless an address begins with tls://."
    )
    pending_messages: int = Field(
        default=65_536, ge=1, description="Received messages that may wait to be read, per subscription."
    )
    pending_mb: int = Field(
        default=64, ge=1, description="MiB of received messages that may wait to be read, per subscription."
    )

    @field_validator("servers")
    @classmethod
    def _servers_are_addresses(cls, value: list[str]) -> list[str]:
        return [_server(text) for text in value]

    @field_validator("prefix")
    @classmethod
    def _prefix_is_a_subject(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError("must be words of letters, digits, - and _, with dots between them")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise SettingsMismatch("`user` and `password` belong together: set both or neither")
        ways = {"user": self.user, "token": self.token, "nkey": self.nkey, "credentials": self.credentials}
        used = [f"`{name}`" for name, value in ways.items() if value is not None]
        if len(used) > 1:
            raise SettingsMismatch(f"{' and '.join(used)} are different ways to log in: set one of them")
        return self

    @property
    def wants_tls(self) -> bool:
        """Whether connections must be encrypted."""
        return self.tls is not None or any(server.startswith("tls://") for server in self.servers)


def _server(text: str) -> str:
    """Return an address in full.

    Raises:
        ValueError: it is none, or holds a password.
    """
    given = text if "://" in text else f"nats://{text}"
    parts = urlsplit(given)
    if "@" in text:
        # Without the text: it holds what should not be shown.
        raise SettingsMismatch(
            "holds a user or password, which would show in logs: set `user` and `password`, or `token`"
        )
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"{text!r} is neither nats://host:port nor tls://host:port")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    if not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"
