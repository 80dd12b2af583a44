"""The settings of the Redis transport."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import urlsplit

from dynamo_core.certificates import ClientTls
from dynamo_core.contracts.config import SettingsMismatch
from dynamo_wire.brokered import BrokeredConfig
from pydantic import Field, SecretStr, field_validator, model_validator

#: Where a server listens if its address does not say.
DEFAULT_PORT = 6379

#: The schemes of addresses, and whether they mean encryption.
SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}

_PREFIX = re.compile(r"[A-Za-z0-9_-]+([.:][A-Za-z0-9_-]+)*")


class RedisConfig(BrokeredConfig):
    """Where the server is and how to log in, beside the bounds of all brokers."""

    url: str = Field(
        default="redis://127.0.0.1:6379",
        description="The server, as redis://host:port, or rediss://host:port with TLS.",
    )
    username: str | None = Field(default=None, description="Log in as this user; null means the default user.")
    password: SecretStr | None = Field(default=None, description="Log in with this password.")
    prefix: str = Field(
        default="dynamo",
        max_length=128,
        description="What every channel begins with. Systems with different prefixes can share a server.",
    )
    tls: ClientTls | None = Field(default=None, description="Encryption; null means none, unless `url` has rediss://.")

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        return _address(value)

    @field_validator("prefix")
    @classmethod
    def _prefix_is_a_channel(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError("must be words of letters, digits, - and _, with dots or colons between them")
        return value

    @model_validator(mode="after")
    def _user_has_a_password(self) -> Self:
        if self.username is not None and self.password is None:
            raise SettingsMismatch("`username` needs a `password`")
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
        raise ValueError(f"{text!r} names a database: channels belong to none")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    if not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not redis://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"
