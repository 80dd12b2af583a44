"""The settings of a Redis connection."""

from __future__ import annotations

from typing import ClassVar, Self
from urllib.parse import urlsplit

from dynamo_core import ClientTls, PluginConfig, SettingsMismatch
from pydantic import Field, SecretStr, field_validator, model_validator

#: The port of a server whose address names none.
DEFAULT_PORT = 6379

#: The schemes of addresses, and whether they mean encryption.
SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}


class RedisSettings(PluginConfig):
    """The server's address, the login, and TLS. A plugin adds its own keys."""

    #: The remedy for an address that names a database.
    DATABASE_IN_URL: ClassVar[str] = "set `database`"

    url: str = Field(
        default="redis://127.0.0.1:6379",
        description="The server, as redis://host:port, or rediss://host:port with TLS.",
    )
    username: str | None = Field(default=None, description="Log in as this user; null means the default user.")
    password: SecretStr | None = Field(default=None, description="Log in with this password.")
    tls: ClientTls | None = Field(default=None, description="Encryption; null means none, unless `url` has rediss://.")

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        """Complete the address."""
        parts = urlsplit(value if "://" in value else f"redis://{value}")
        if "@" in value:
            # Without the text: it holds a secret.
            raise SettingsMismatch("holds a user or password, which would show in logs: set `username` and `password`")
        if parts.scheme not in SCHEMES:
            raise ValueError(f"{value!r} is neither redis://host:port nor rediss://host:port")
        if parts.path.strip("/"):
            raise ValueError(f"{value!r} names a database: {cls.DATABASE_IN_URL}")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"{value!r} has a port that is none") from None
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{value!r} is not redis://host:port")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{parts.scheme}://{host}:{port or DEFAULT_PORT}"

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


class SharedCountSettings(RedisSettings):
    """The server where frontends share their counts of clients. A plugin adds its own keys."""

    url: str = Field(description="The Redis server, as redis://host:port, or rediss://host:port with TLS.")
    database: int = Field(default=0, ge=0, description="The number of the database.")
    prefix: str = Field(
        default="dynamo",
        min_length=1,
        max_length=128,
        description="What every key begins with. Frontends with the same one share their limits.",
    )
