"""Authentication: proofs that both ends know the secret, and TLS contexts."""

from __future__ import annotations

import hmac
import ssl

from dynamo_core import client_context, load_authorities, load_own

from dynamo_plugin_transport_tcp.config import TcpTls

CALLER = b"caller"
LISTENER = b"listener"

#: Bytes of each end's random challenge.
CHALLENGE_BYTES = 32


def proof(secret: bytes | None, role: bytes, nonce: bytes, caller: bytes, listener: bytes) -> bytes:
    """Return what the end called `role` sends to prove that it knows the secret; empty without one.

    Bound to the process that is meant (`nonce`) and to both challenges, so that it is of no use anywhere else, nor for
    the other role.
    """
    if secret is None:
        return b""
    return hmac.digest(secret, b"dynamo-tcp/1\0" + role + b"\0" + nonce + caller + listener, "sha256")


def proven(expected: bytes, given: bytes) -> bool:
    """Return whether the proofs are equal, compared in constant time."""
    return hmac.compare_digest(expected, given)


def listening_context(tls: TcpTls) -> ssl.SSLContext:
    """Return what a worker's listener uses.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load_own(context, tls.cert, tls.key, "transport.tls")
    if tls.client_ca is not None:
        load_authorities(context, tls.client_ca, "transport.tls.client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def calling_context(tls: TcpTls) -> ssl.SSLContext:
    """Return what callers use.

    Raises:
        ConfigError: a file cannot be used.
    """
    return client_context(tls, "transport.tls", only_ca=True, minimum=ssl.TLSVersion.TLSv1_3)
