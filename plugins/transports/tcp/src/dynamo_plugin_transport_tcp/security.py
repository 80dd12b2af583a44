"""Whom to believe: proofs that both ends know the secret, and TLS contexts."""

from __future__ import annotations

import hmac
import ssl
from pathlib import Path

from dynamo_core.errors import ConfigError

from dynamo_plugin_transport_tcp.config import TlsConfig

CALLER = b"caller"
LISTENER = b"listener"

#: Bytes of each end's random challenge.
CHALLENGE_BYTES = 32


def proof(secret: bytes | None, role: bytes, nonce: bytes, caller: bytes, listener: bytes) -> bytes:
    """What the end called `role` sends to prove that it knows the secret; empty without one.

    Bound to the process that is meant (`nonce`) and to both challenges, so that it is of no use anywhere else, nor for
    the other role.
    """
    if secret is None:
        return b""
    return hmac.digest(secret, b"dynamo-tcp/1\0" + role + b"\0" + nonce + caller + listener, "sha256")


def proven(expected: bytes, given: bytes) -> bool:
    """Whether the proofs are equal, in a time that tells nothing."""
    return hmac.compare_digest(expected, given)


def listening_context(tls: TlsConfig) -> ssl.SSLContext:
    """What a worker's listener uses.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_own(context, tls)
    if tls.client_ca is not None:
        _load_authorities(context, tls.client_ca, "client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def calling_context(tls: TlsConfig) -> ssl.SSLContext:
    """What callers use.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_own(context, tls)
    if tls.ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, tls.ca, "ca")
    return context


def _load_own(context: ssl.SSLContext, tls: TlsConfig) -> None:
    try:
        # A password that is never right: without one, an encrypted key would ask on the terminal and wait for ever.
        context.load_cert_chain(tls.cert, tls.key, password="")
    except OSError as error:
        raise ConfigError(
            f"transport.tls: cert {str(tls.cert)!r} and key {str(tls.key)!r} cannot be used: {_reason(error)}; both "
            "must be PEM files that belong together, the key without a passphrase",
            cause=error,
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path, key: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(
            f"transport.tls.{key}: {str(path)!r} cannot be used: {_reason(error)}; it must be a PEM file with the "
            "certificates of authorities",
            cause=error,
        ) from error


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return reason or str(error)
