"""Certificates: the settings that name them, for clients and for listeners, and the TLS contexts made of those.

An error tells which setting is wrong, and what it must hold.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from dynamo_core.contracts.config import PluginConfig, SettingsMismatch
from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file

#: Modern servers and clients speak 1.3; some that are still about speak 1.2. Nothing below it is safe.
MINIMUM = ssl.TLSVersion.TLSv1_2

#: Days before its end in which a certificate is remarked on.
SOON = 14
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
#: Tags of DER.
_VERSION, _UTC_TIME = 0xA0, 0x17

_PemFile = Annotated[str, StringConstraints(min_length=1)]


class ClientTls(PluginConfig):
    """Encryption; a certificate that is not for the host of the address is refused."""

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
            raise SettingsMismatch("`cert` and `key` belong together: set both or neither")
        return self


class ServerTls(PluginConfig):
    """The certificate of a listener; without one it speaks plain HTTP."""

    cert: _PemFile | None = Field(
        default=None,
        description="PEM file with the certificate of this host and those up to the root; null means no TLS.",
    )
    key: _PemFile | None = Field(
        default=None, description="PEM file with its private key; null means it is in `cert` too."
    )
    client_ca: _PemFile | None = Field(
        default=None,
        description="PEM file with the authorities of clients: clients without a certificate of theirs are refused.",
    )

    @model_validator(mode="after")
    def _check_cert(self) -> Self:
        if self.cert is None and (self.key is not None or self.client_ca is not None):
            given = "key" if self.key is not None else "client_ca"
            raise ValueError(
                f"{given} is given without cert, so there would be no TLS: set cert too, or leave both out"
            )
        return self


class _Encrypted(Exception):
    """The private key needs a passphrase."""


def client_context(
    tls: ClientTls, setting: str, *, only_ca: bool = False, minimum: ssl.TLSVersion = MINIMUM
) -> ssl.SSLContext:
    """Return what encrypted connections are made with. Read the files: for a thread, or at the start.

    Args:
        tls: the files.
        setting: where `tls` stands, such as ``discovery.tls``.
        only_ca: whether `ca`, where it is set, replaces the system's list of authorities.
        minimum: the oldest version of TLS that is spoken.

    Raises:
        ConfigError: one of the files cannot be used.
    """
    if only_ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if tls.ca is None:
            context.load_default_certs()
    else:
        context = ssl.create_default_context()
    context.minimum_version = minimum
    if tls.ca is not None:
        load_authorities(context, tls.ca, f"{setting}.ca")
    if tls.cert is not None and tls.key is not None:
        load_own(context, tls.cert, tls.key, setting)
    return context


def load_authorities(context: ssl.SSLContext, path: Path, setting: str) -> None:
    """Trust the certificates that the authorities in a file have signed.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        read_file(path, pipe=False)
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {str(path)!r} cannot be used: {_reason(error)}; it must be a PEM file with the certificates "
            "of authorities",
            cause=error,
        ) from error


def load_own(context: ssl.SSLContext, cert: Path, key: Path, setting: str) -> None:
    """Load this process's certificate; `setting` is the one that holds `cert` and `key`.

    Raises:
        ConfigError: the files cannot be used, do not belong together, or the certificate is not valid now.
    """
    try:
        data = read_file(cert, pipe=False).data
        read_file(key, pipe=False)
        # A passphrase that is never right: without one, an encrypted key would ask on the terminal and wait for ever.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ConfigError(
            f"{setting}: cert {str(cert)!r} and key {str(key)!r} cannot be used: {_reason(error)}; both must be PEM "
            "files that belong together, the key without a passphrase",
            cause=error,
        ) from error
    _check_validity(f"{setting}.cert", cert, data)


def server_context(tls: ServerTls, setting: str) -> ssl.SSLContext | None:
    """Return the context of a listener, or None if it has no certificate.

    `setting` is where `tls` stands, for messages.

    Raises:
        ConfigError: a file cannot be read or used, or the certificate is not valid now; the message names the key and
            the file.
    """
    cert = tls.cert
    if cert is None:
        return None
    for name, path in (("key", tls.key), ("client_ca", tls.client_ca)):
        if path is not None:
            _read(f"{setting}.{name}", path)
    data = _read(f"{setting}.cert", cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = MINIMUM
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, setting, cert, tls.key)
    _check_validity(f"{setting}.cert", cert, data)
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{setting}.client_ca: {tls.client_ca} holds no certificates in PEM form ({_reason(error)})"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def expiry_remark(tls: ServerTls) -> str:
    """Return a remark on a certificate that expires soon; empty if it does not, or cannot be read.

    Soon are `SOON` days, or a third of its life if that is less.
    """
    try:
        begin, end = _validity(b"" if tls.cert is None else read_file(tls.cert, pipe=False).data)
    except (OSError, ValueError):
        return ""
    left = end - datetime.now(UTC)
    if left > min(timedelta(days=SOON), (end - begin) / 3):
        return ""
    return f"the certificate {tls.cert} expires on {end:%Y-%m-%d %H:%M} UTC; renew it before then"


def _read(key: str, path: str) -> bytes:
    try:
        return read_file(path, pipe=False).data
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read: {error.strerror}; name a PEM file that this user may read"
        ) from error


def _check_validity(key: str, path: str | Path, data: bytes) -> None:
    """Raise ConfigError if the first certificate of a PEM file is not valid now."""
    try:
        begin, end = _validity(data)
    except ValueError:
        # An older form of PEM, which OpenSSL reads as well.
        return
    now = datetime.now(UTC)
    if now > end:
        raise ConfigError(f"{key}: the certificate {path} expired on {end:%Y-%m-%d %H:%M} UTC; renew it")
    if now < begin:
        raise ConfigError(
            f"{key}: the certificate {path} is valid from {begin:%Y-%m-%d %H:%M} UTC only; correct the clock of this "
            "host, or wait"
        )


def _validity(pem: bytes) -> tuple[datetime, datetime]:
    """Return begin and end of the validity of the first certificate in PEM form.

    Raises:
        ValueError: there is none.
    """
    _, mark, rest = pem.partition(_BEGIN)
    der = ssl.PEM_cert_to_DER_cert((mark + rest.partition(_END)[0] + _END).decode("ascii"))
    # Certificate, and in it the part that is signed: version (optional), serial number, algorithm, issuer, validity.
    inner = _element(der, _element(der, 0)[1])[1]
    for _ in range(4 if der[inner] == _VERSION else 3):
        inner = _element(der, inner)[2]
    _, begin, _ = _element(der, inner)
    _, _, end = _element(der, begin)
    return _time(der, begin), _time(der, end)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of a DER element, where its content begins, and where it ends."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start])
    return der[at], start, start + length


def _time(der: bytes, at: int) -> datetime:
    tag, start, end = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[start:end].decode("ascii"), form).replace(tzinfo=UTC)


def _load_pair(context: ssl.SSLContext, setting: str, cert: str, key: str | None) -> None:
    def passphrase() -> str:
        # Without this the library would ask on the terminal.
        raise _Encrypted

    where = f"{setting}.cert: {cert}" if key is None else f"{setting}.key: {key}"
    try:
        context.load_cert_chain(cert, key, password=passphrase)
    except _Encrypted:
        raise ConfigError(f"{where} holds an encrypted private key; give one without a passphrase") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        if "MISMATCH" in str(error):
            raise ConfigError(f"{where} holds the private key of another certificate than {cert}") from error
        blame = f"{setting}.cert: {cert}" if not _has_certificate(cert) else where
        what = "no certificate" if not _has_certificate(cert) else "no private key"
        raise ConfigError(f"{blame} holds {what} in PEM form that can be used ({_reason(error)})") from error


def _has_certificate(path: str) -> bool:
    """Return whether a file holds certificates, whatever else is wrong."""
    try:
        ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError):
        return False
    return True


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error)
