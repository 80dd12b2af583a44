"""TLS for a listener: from the files that the settings name to a context."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Protocol

from dynamo_core.errors import ConfigError

#: Modern servers and clients speak 1.3; some that are still about speak 1.2. Nothing below it is safe.
MINIMUM = ssl.TLSVersion.TLSv1_2


class TlsFiles(Protocol):
    """The PEM files of a listener, as the settings hold them."""

    @property
    def cert(self) -> str | None:
        """The certificate; None means no TLS."""

    @property
    def key(self) -> str | None:
        """Its private key; None means it is in `cert` too."""

    @property
    def client_ca(self) -> str | None:
        """The authorities of clients; None lets everybody in."""


class _Encrypted(Exception):
    """The private key wants a passphrase."""


def server_context(section: str, settings: TlsFiles) -> ssl.SSLContext | None:
    """The context of a listener, or None if it has no certificate. `section` is where the settings are, for messages.

    Raises:
        ConfigError: a file cannot be read or used; the message names the key and the file.
    """
    cert = settings.cert
    if cert is None:
        return None
    for name, path in (("cert", cert), ("key", settings.key), ("client_ca", settings.client_ca)):
        if path is not None:
            _check_readable(f"{section}.{name}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, section, cert, settings.key)
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{section}.client_ca: {settings.client_ca} holds no certificates in PEM form ({_reason(error)})"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(key: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read: {error.strerror}; name a PEM file that this user may read"
        ) from error


def _load_pair(context: ssl.SSLContext, section: str, cert: str, key: str | None) -> None:
    def passphrase() -> str:
        # Without this the library would ask on the terminal.
        raise _Encrypted

    where = f"{section}.cert: {cert}" if key is None else f"{section}.key: {key}"
    try:
        context.load_cert_chain(cert, key, password=passphrase)
    except _Encrypted:
        raise ConfigError(f"{where} holds an encrypted private key; give one without a passphrase") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        if "MISMATCH" in str(error):
            raise ConfigError(f"{where} holds the private key of another certificate than {cert}") from error
        blame = f"{section}.cert: {cert}" if not _has_certificate(cert) else where
        what = "no certificate" if not _has_certificate(cert) else "no private key"
        raise ConfigError(f"{blame} holds {what} in PEM form that can be used ({_reason(error)})") from error


def _has_certificate(path: str) -> bool:
    """Whether a file holds certificates, whatever else is wrong."""
    try:
        ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError):
        return False
    return True


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error)
