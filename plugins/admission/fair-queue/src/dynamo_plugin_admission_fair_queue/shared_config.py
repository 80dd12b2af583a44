"""The settings of limits that several frontends share."""

from __future__ import annotations

from urllib.parse import urlsplit

from dynamo_core import PluginConfig, SettingsMismatch
from dynamo_core.certificates import ClientTls
from dynamo_leases.times import check_times
from pydantic import Field, SecretStr, ValidationInfo, field_validator

#: Where a server listens if its address does not say.
DEFAULT_PORT = 6379

#: The schemes of addresses, and whether they mean encryption.
SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}


class SharedConfig(PluginConfig):
    """Where frontends tell each other what tenants have, and how often. Times in seconds."""

    url: str = Field(description="The Redis server, as redis://host:port, or rediss://host:port with TLS.")
    username: str | None = Field(default=None, description="Log in as this user; null means the default user.")
    password: SecretStr | None = Field(default=None, description="Log in with this password.")
    database: int = Field(default=0, ge=0, description="The number of the database.")
    prefix: str = Field(
        default="dynamo",
        min_length=1,
        max_length=128,
        description="What every key begins with. Frontends with the same one share their limits.",
    )
    tls: ClientTls | None = Field(default=None, description="Encryption; null means none, unless `url` has rediss://.")
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

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str) -> str:
        return _address(value)

    # Of a whole section with a password nobody is told why it is refused: so each of these names its key.

    @field_validator("password")
    @classmethod
    def _user_has_a_password(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is None and info.data.get("username") is not None:
            raise ValueError("`username` needs a `password`")
        return value

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
