"""The settings of an upstream."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from dynamo_core import ClientTls, PluginConfig, SettingsMismatch
from pydantic import Field, SecretStr, field_validator, model_validator


class UpstreamConfig(PluginConfig):
    """The server's address, and its timeouts. Times are in seconds."""

    url: str = Field(description="The server's address, such as http://10.0.0.5:8000; without a path, /v1 is meant.")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="What the server calls the model; null means as here, or the only one that it lists.",
    )
    api_key: SecretStr | None = Field(
        default=None, description="Sent as a bearer token; write ${env:NAME} to take it from the environment."
    )
    tls: ClientTls | None = Field(default=None, description="Encryption; null means what an https:// address needs.")
    start_timeout: float = Field(
        default=120.0, ge=0, le=86_400, description="How long a starting worker waits for a server that is not up yet."
    )
    connect_timeout: float = Field(default=5.0, gt=0, le=3600, description="Until a connection stands.")
    first_byte_timeout: float = Field(
        default=300.0, gt=0, le=86_400, description="Until the answer begins: the server's queue and the prompt."
    )
    silence_timeout: float = Field(
        default=60.0, gt=0, le=86_400, description="How long an answer that has begun may pause."
    )
    keep_alive: float = Field(
        default=4.0,
        ge=0,
        le=3600,
        description="How long an idle connection is kept; less than the server keeps it, or requests meet closed ones.",
    )

    forward_headers: bool = Field(
        default=False,
        description="Whether the server gets the request headers that frontends forward to workers.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_a_base(cls, value: str) -> str:
        return _base(value)

    @field_validator("api_key")
    @classmethod
    def _key_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        # The text itself is not repeated.
        if value is not None and (not value.get_secret_value().isascii() or not value.get_secret_value().isprintable()):
            raise ValueError("holds characters that no key has, perhaps the line end of a file")
        return value if value is None or value.get_secret_value() else None

    @model_validator(mode="after")
    def _tls_is_for_https(self) -> Self:
        if self.tls is not None and self.url.startswith("http:"):
            raise SettingsMismatch("url is not encrypted, and `tls` is set: write https://")
        return self


def _base(text: str) -> str:
    """Return the address that paths such as ``/models`` are put behind.

    Raises:
        ValueError: it is none, or holds what has a key of its own.
    """
    parts = urlsplit(text)
    if "@" in text:
        # Without the text: it holds what should not be shown.
        raise SettingsMismatch("holds a user or password, which would show in logs: set `api_key`")
    try:
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not an address such as http://host:port or https://host:port/v1")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
