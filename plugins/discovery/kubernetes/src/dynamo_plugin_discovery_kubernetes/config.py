"""The settings of Kubernetes discovery."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from dynamo_core import ClientTls, PluginConfig, SettingsMismatch
from dynamo_leases import check_times
from pydantic import Field, SecretStr, field_validator, model_validator

#: Hosts to which a token may be sent without encryption.
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: What Kubernetes takes as a namespace, and as a part of an object's name.
_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
#: What it takes as the name of a pod.
_NAME = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"


class KubernetesConfig(PluginConfig):
    """The API server, the identity of this process, and how soon a silent process counts as dead. Times in seconds."""

    url: str | None = Field(
        default=None, description="The API server, as https://host:port; null means that of the cluster around the pod."
    )
    namespace: str | None = Field(
        default=None,
        pattern=_LABEL,
        max_length=63,
        description="Where the objects live; null means the service account's namespace, or `default` without one.",
    )
    token: SecretStr | None = Field(default=None, description="What identifies this process, a bearer token.")
    token_file: Path | None = Field(
        default=None, description="A file with the token instead, which is read again as it rotates."
    )
    tls: ClientTls | None = Field(
        default=None, description="Encryption; null means the service account's authority, or the system's list."
    )
    service_account: Path | None = Field(
        default=None,
        description="The folder with `token`, `ca.crt` and `namespace`; null means where Kubernetes mounts it, "
        "and none if `url` is set.",
    )
    pod: str | None = Field(
        default=None,
        pattern=_NAME,
        max_length=253,
        description="The pod that owns the leases; null means `POD_NAME` or the host's name in a pod, else none.",
    )
    prefix: str = Field(
        default="dynamo",
        pattern=_LABEL,
        max_length=63,
        description="What every object's name begins with. Systems with different prefixes can share a namespace.",
    )
    ttl: float = Field(
        default=15.0,
        ge=1,
        le=3600,
        description="Seconds without a heartbeat after which a process counts as dead; rounded up to full seconds.",
    )
    heartbeat: float | None = Field(
        default=None, gt=0, description="Seconds between two heartbeats; null means a third of `ttl`."
    )
    poll: float = Field(
        default=1.0, gt=0, description="Seconds between two looks for processes that died, and between retries."
    )
    timeout: float = Field(default=4.0, gt=0, description="How long connecting, or one answer of the server, may take.")
    watch_timeout: float = Field(
        default=120.0, ge=1, description="Seconds after which a watch is opened anew where it left off."
    )
    start_timeout: float = Field(
        default=120.0, ge=0, description="How long a starting process waits for a server that is not there yet."
    )
    lost_after: float = Field(
        default=60.0,
        gt=0,
        description="How long a server that is there may refuse a lease before the process gives up.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else _address(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise SettingsMismatch("`token` and `token_file` are two ways of saying the same: set one")
        check_times(self.ttl, 2, heartbeat=self.heartbeat)
        check_times(self.ttl, 3, poll=self.poll, timeout=self.timeout)
        return self


def _address(text: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ValueError: it is none, or would send a token through the network for all to read.
    """
    parts = urlsplit(text)
    if "@" in text:
        # Without the text: it holds what should not be shown.
        raise SettingsMismatch("holds a user or password, which would show in logs: set `token`")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has a port that is none") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not https://host:port")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError(f"{text!r} is not encrypted, and not on this host: write https://")
    return text.rstrip("/")
