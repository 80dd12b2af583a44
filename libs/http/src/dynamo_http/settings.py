"""The settings of listeners and of authentication."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from dynamo_core.contracts.field_types import NotBool, Positive, Seconds, Text, Word
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

#: Headers that hold secrets of the client.
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


def _header_name(value: str) -> str:
    name = value.lower()
    if name in _SECRET_HEADERS:
        raise ValueError(
            f"`{name}` holds a secret of the client: let clients send what plugins may see in another header"
        )
    return name


#: A scheme and a host, perhaps a port, and nothing behind them: browsers send no more.
Origin = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://[^/?#*\s]+$")]
#: Names of HTTP headers, in any case.
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"), AfterValidator(_header_name)]

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_STRICT = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class KeySettings(BaseModel):
    """An API key: the place of its hash, and its purpose."""

    model_config = _STRICT

    id: Word = Field(description="Its name in logs and for admission.")
    hash: str | None = Field(default=None, description="`sha256:` and the hash, as `dynamo key new` prints it.")
    env: Text | None = Field(
        default=None, description="The environment variable that holds the key, in place of `hash`."
    )
    models: tuple[Text, ...] | None = Field(default=None, description="The models it may ask for; null means all.")
    tenant: Text = Field(default="default", description="Whose key it is, for admission.")
    priority: Annotated[int, NotBool] = Field(default=0, description="Higher goes first, where admission goes by it.")

    @model_validator(mode="after")
    def _check_source(self) -> KeySettings:
        if (self.hash is None) is (self.env is None):
            raise ValueError(f"key {self.id!r} needs either hash or env")
        if self.hash is not None and not _HASH.fullmatch(self.hash):
            # What was written is not repeated: it may be the key itself.
            raise ValueError(
                f"the hash of key {self.id!r} is not `sha256:` and 64 hexadecimal digits, as `dynamo key new` prints it"
            )
        return self


class AuthSettings(BaseModel):
    """The clients that may use models. Without keys, all that reach the listener."""

    model_config = _STRICT

    keys: tuple[KeySettings, ...] = Field(
        default=(), description="API keys: `id`, `hash` or `env`, `models`, `tenant`, `priority`; none asks for no key."
    )

    @model_validator(mode="after")
    def _check_doubles(self) -> AuthSettings:
        for name in ("id", "hash", "env"):
            seen: set[str | None] = set()
            for key in self.keys:
                value = getattr(key, name)
                if value is not None and value in seen:
                    raise ValueError(f"two keys have the same {name}; the second is {key.id!r}")
                seen.add(value)
        return self


class CorsSettings(BaseModel):
    """The web pages that may send requests from a browser."""

    model_config = _STRICT

    origins: tuple[Origin, ...] = Field(
        default=(),
        description="Origins such as `https://chat.example.com`, matched exactly; an empty list disables CORS.",
    )


class HttpSettings(BaseModel):
    """Limits of the listeners."""

    model_config = _STRICT

    body_limit_mb: Positive = Field(default=45, description="Largest request body, in MB.")
    bodies_limit_mb: Positive = Field(
        default=192,
        description="MB that large request bodies may take together while they arrive, and again while they are "
        "parsed and encoded; more wait.",
    )
    max_connections: Positive = Field(default=10000, description="Connections open at once.")
    header_timeout: Seconds = Field(
        default=10, description="Seconds for a TLS handshake, and for the first header of a connection."
    )
    body_timeout: Seconds = Field(default=60, description="Seconds for the body of a request to arrive.")
    idle_timeout: Seconds = Field(default=75, description="Seconds after which an idle connection is closed.")
    cors: CorsSettings = Field(default_factory=CorsSettings)
    metrics_prefix: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")] = Field(
        default="dynamo_frontend", description="Prefix of the frontend's metrics."
    )
    overload_status: Literal[503, 529, 429] = Field(
        default=503, description="HTTP status of a request that is refused for load."
    )
    session_header: HeaderName | None = Field(
        default=None,
        description="The request header that names the client's session, for routers and admission; null means none.",
    )
    forward_headers: tuple[HeaderName, ...] = Field(
        default=(),
        description="Request headers that routers, admission and extensions see; never those that hold secrets.",
    )
    forward_identity: bool = Field(
        default=False,
        description="Whether workers are told tenant, user and session of each request, and its `forward_headers`.",
    )
