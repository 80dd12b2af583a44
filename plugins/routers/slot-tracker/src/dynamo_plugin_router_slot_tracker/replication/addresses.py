"""Addresses of replicas: the ZMQ endpoints accepted from an operator and from a client."""

from __future__ import annotations

import ipaddress
import re

#: What an operator may name.
_SCHEMES = ("tcp", "ipc")
MAX_PORT = 65535
#: Characters of an endpoint that a message repeats.
_SHOWN = 500

_port_number = re.compile(r"[0-9]{1,5}")
#: A host name, with the underscores that names in containers have. A last label of digits belongs to an IPv4 address.
_host_name = re.compile(r"(?=.{1,254}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.|$))+")
_ends_in_digits = re.compile(r"(^|\.)[0-9]+\.?$")


def check_endpoint(endpoint: str) -> None:
    """Refuse what is no endpoint of another process.

    Raises:
        ValueError: the text says what is wrong.
    """
    if reason := _fault(endpoint, _SCHEMES):
        raise _invalid(endpoint, reason)


def check_peer(endpoint: str) -> None:
    """Refuse what a client may not register: all but the host and port of a TCP socket.

    Files and multicast groups of this host are no affair of a client. The library itself refuses the host ``*``.

    Raises:
        ValueError: the text says what is wrong.
    """
    reason = _fault(endpoint, ("tcp",))
    if reason is None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if port == "*" or int(port) == 0:
            reason = "invalid TCP port"
        elif host != "*" and not _is_host(host):
            reason = "invalid host"
    if reason is not None:
        raise _invalid(endpoint, reason)


def _fault(endpoint: str, schemes: tuple[str, ...]) -> str | None:
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not scheme:
        return "missing scheme"
    if scheme not in schemes:
        return f"unsupported scheme `{scheme[:_SHOWN]}`"
    if "\0" in rest or not rest:
        return "missing address"
    if scheme != "tcp":
        return None
    port = _port(rest)
    if not port:
        return "missing TCP port"
    if port != "*" and not (_port_number.fullmatch(port) and int(port) <= MAX_PORT):
        # The library would take another one, without a word.
        return "invalid TCP port"
    return None


def _invalid(endpoint: str, reason: str) -> ValueError:
    shown = endpoint if len(endpoint) <= _SHOWN else f"{endpoint[:_SHOWN]}…"
    return ValueError(f"invalid ZMQ endpoint `{shown}`: {reason}")


def _port(address: str) -> str:
    host, _, port = address.rpartition(":")
    # The colons of an IPv6 address are no port's.
    return port if host and "]" not in port else ""


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            ipaddress.IPv6Address(host[1:-1])
        elif _ends_in_digits.search(host):
            ipaddress.IPv4Address(host)
        else:
            return _host_name.fullmatch(host) is not None
    except ValueError:
        return False
    return True
