"""The networks that a caller connects to: a record can name any address, and an attacker may write one."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from dynamo_core.errors import CannotConnect

from dynamo_plugin_transport_tcp.address import own_address

log = logging.getLogger(__name__)

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Networks that are not public: loopback, private, shared by carriers and clouds, link-local. 169.254.0.0/16 is left
#: out: clouds serve the metadata of the machine there.
PRIVATE: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
)

#: Seconds between two warnings.
AGAIN = 60.0

_ROUTES = Path("/proc/net/route")
_ADDRESSES6 = Path("/proc/net/if_inet6")


class AllowedNetworks:
    """A resolver of hosts that returns only allowed addresses."""

    def __init__(self, networks: Sequence[str] | None) -> None:
        """`networks` in CIDR notation; None for `PRIVATE` and those that this machine is in."""
        self._networks = PRIVATE if networks is None else tuple(map(ipaddress.ip_network, networks))
        self._own = networks is None
        self._warned: float | None = None

    def allow(self, address: str) -> bool:
        """Return whether an address, as numbers, may be connected to."""
        place = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(place, ipaddress.IPv6Address) and place.ipv4_mapped is not None:
            place = place.ipv4_mapped
        return _within(place, self._networks) or (self._own and _within(place, own_networks()))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that may be connected to, as numbers and in the order of preference.

        Connect to these, and not to the name: it might stand for another address the next time.

        Raises:
            CannotConnect: there is none that may be.
            OSError: the host cannot be resolved.
        """
        addresses = await lookup(host, port)
        allowed = [address for address in addresses if self.allow(address)]
        if not allowed:
            refusal = f"{host} is at {', '.join(addresses)}, outside of `transport.allowed_networks`"
            self._warn(refusal)
            raise CannotConnect(refusal)
        return allowed

    def _warn(self, refusal: str) -> None:
        now = monotonic()
        if self._warned is None or now - self._warned >= AGAIN:
            self._warned = now
            log.warning("a worker is not connected to: %s", refusal)


async def lookup(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as numbers and in the order of preference."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_networks() -> tuple[Network, ...]:
    """Return the networks that this machine is in, without a router between; none where the system does not say."""
    return (*_own4(), *_own6())


def _own4() -> Iterator[Network]:
    address = own_address()
    if address is not None:
        yield ipaddress.ip_network(address)
    for line in _lines(_ROUTES):
        _, destination, gateway, _, _, _, _, mask, *_ = line.split()
        length = int(mask, 16).bit_count()
        if int(gateway, 16) == 0 and length:
            network = int(destination, 16).to_bytes(4, sys.byteorder)
            yield ipaddress.ip_network((network, length), strict=False)


def _own6() -> Iterator[Network]:
    for line in _lines(_ADDRESSES6):
        address, _, prefix, *_ = line.split()
        if length := int(prefix, 16):
            yield ipaddress.ip_network((bytes.fromhex(address), length), strict=False)


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    # The first line of the table of routes has the names of its columns.
    return [line for line in lines if not line.startswith("Iface")]


def _within(place: Address, networks: Iterable[Network]) -> bool:
    return any(place in network for network in networks if network.version == place.version)
