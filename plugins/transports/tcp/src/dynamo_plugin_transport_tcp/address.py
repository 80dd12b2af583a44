"""Addresses: ``host:port`` in settings, ``host:port/nonce`` in records."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

#: Bytes of the number that tells one run of a process from every other.
NONCE_BYTES = 16

#: Nothing is ever sent there: the system is only asked which of its own addresses it would use.
_ELSEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a process, and the run of the process."""

    host: str
    port: int
    nonce: bytes

    def __str__(self) -> str:
        return f"{join_host_port(self.host, self.port)}/{self.nonce.hex()}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in a record.

        Raises:
            ValueError: it is none.
        """
        place, _, nonce = text.partition("/")
        host, port = split_host_port(place)
        if port is None or len(nonce) != 2 * NONCE_BYTES:
            raise ValueError(f"{text!r} is not host:port/nonce")
        return cls(host, port, bytes.fromhex(nonce))


def split_host_port(text: str) -> tuple[str, int | None]:
    """Return host and port of ``host``, ``host:port`` or ``[v6]:port``; the port is None if there is none.

    Raises:
        ValueError: the text is none of these.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [address]:port")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if not host:
        raise ValueError(f"{text!r} names no host")
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{port!r} is not a port")
    return host, int(port)


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets where IPv6 needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(host: str) -> bool:
    """Return whether `host` is an address as numbers, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. A name other than ``localhost`` counts as reached by others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Return whether `host` stands for all addresses of the machine, such as ``0.0.0.0``."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def own_address() -> str | None:
    """Return the address under which this machine reaches others; None if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return None
        host: str = probe.getsockname()[0]
    return None if is_unspecified(host) else host
