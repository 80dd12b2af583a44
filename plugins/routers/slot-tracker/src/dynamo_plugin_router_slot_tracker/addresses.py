"""Addresses of replicas: which ZMQ endpoints are accepted."""

from __future__ import annotations

#: What reaches other processes.
_SCHEMES = ("tcp", "ipc")
MAX_PORT = 65535


def check_endpoint(endpoint: str) -> None:
    """Refuses what is no endpoint of another process.

    Raises:
        ValueError: the text says what is wrong.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not scheme:
        reason = "missing scheme"
    elif scheme not in _SCHEMES:
        reason = f"unsupported scheme `{scheme}`"
    elif "\0" in rest or not rest:
        reason = "missing address"
    elif scheme == "tcp" and not (port := _port(rest)):
        reason = "missing TCP port"
    elif scheme == "tcp" and port != "*" and not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        # The library would take another one, without a word.
        reason = "invalid TCP port"
    else:
        return
    raise ValueError(f"invalid ZMQ endpoint `{endpoint}`: {reason}")


def _port(address: str) -> str:
    host, _, port = address.rpartition(":")
    # The colons of an IPv6 address are no port's.
    return port if host and "]" not in port else ""
