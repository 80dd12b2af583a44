"""The certificates with which a store is reached."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError


class TlsConfig(PluginConfig):
    """Encryption; a certificate that is not for the host that was asked is refused."""

    ca: Path | None = Field(
        default=None,
        description="Who may sign the server's certificate besides the authorities of the system's list, a PEM file.",
    )
    cert: Path | None = Field(
        default=None, description="This process's certificate chain, a PEM file, for a server that asks for one."
    )
    key: Path | None = Field(default=None, description="The private key of `cert`, a PEM file without a passphrase.")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("`cert` and `key` belong together: set both or neither")
        return self


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """What encrypted connections are made with. Reads the files: for a thread, or at the start.

    Raises:
        ConfigError: one of them cannot be used.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except OSError as error:
        raise ConfigError(
            f"discovery.tls.ca: {str(tls.ca)!r} cannot be used: {_reason(error)}; it must be a PEM file with the "
            "certificates of authorities",
            cause=error,
        ) from error
    try:
        if tls.cert is not None and tls.key is not None:
            # Without a passphrase here, an encrypted key would ask on the terminal and wait for ever.
            context.load_cert_chain(tls.cert, tls.key, password="")
    except OSError as error:
        raise ConfigError(
            f"discovery.tls: cert {str(tls.cert)!r} and key {str(tls.key)!r} cannot be used: {_reason(error)}; both "
            "must be PEM files that belong together, the key without a passphrase",
            cause=error,
        ) from error
    return context


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return reason or str(error)
