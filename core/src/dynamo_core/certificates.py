"""Certificates that settings name, loaded for TLS. An error tells which setting, and what it must hold."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Protocol

from dynamo_core.errors import ConfigError


class ClientTls(Protocol):
    """Settings with which a server is reached."""

    @property
    def ca(self) -> Path | None:
        """Who may sign the server's certificate besides the system's list."""

    @property
    def cert(self) -> Path | None:
        """This process's certificate chain, for a server that asks for one."""

    @property
    def key(self) -> Path | None:
        """The private key of `cert`."""


def client_context(tls: ClientTls, setting: str) -> ssl.SSLContext:
    """What encrypted connections are made with. Reads the files: for a thread, or at the start.

    `setting` is where `tls` stands, such as ``discovery.tls``.

    Raises:
        ConfigError: one of the files cannot be used.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca is not None:
        load_authorities(context, tls.ca, f"{setting}.ca")
    if tls.cert is not None and tls.key is not None:
        load_own(context, tls.cert, tls.key, setting)
    return context


def load_authorities(context: ssl.SSLContext, path: Path, setting: str) -> None:
    """Trusts whoever the authorities in a file have signed for.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {str(path)!r} cannot be used: {_reason(error)}; it must be a PEM file with the certificates "
            "of authorities",
            cause=error,
        ) from error


def load_own(context: ssl.SSLContext, cert: Path, key: Path, setting: str) -> None:
    """Loads this process's certificate; `setting` is the one that holds `cert` and `key`.

    Raises:
        ConfigError: the files cannot be used, or do not belong together.
    """
    try:
        # A passphrase that is never right: without one, an encrypted key would ask on the terminal and wait for ever.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ConfigError(
            f"{setting}: cert {str(cert)!r} and key {str(key)!r} cannot be used: {_reason(error)}; both must be PEM "
            "files that belong together, the key without a passphrase",
            cause=error,
        ) from error


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return reason or str(error)
