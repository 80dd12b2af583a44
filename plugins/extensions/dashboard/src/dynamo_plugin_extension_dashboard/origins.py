"""Where a request of a browser comes from: what pages of other sites send is refused."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

_LOCAL_NAMES = frozenset({"localhost", "localhost."})


def is_address(host: str) -> bool:
    """Whether a host is an address and no name. A name could be one of another site that was made to lead here."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str | None) -> bool:
    """Whether the peer with an address is on this host."""
    return address is not None and is_address(address) and ip_address(address).is_loopback


def unknown_host(http: web.Request, hosts: Collection[str]) -> str:
    """What is wrong with the ``Host`` of a request; empty if nothing is.

    `hosts` are the names by which the frontend is called, beside addresses and localhost.
    """
    named = _host_of(f"//{http.headers.get('Host', '')}")
    if named is not None and (is_address(named) or named in _LOCAL_NAMES or named in hosts):
        return ""
    return "the host that was asked for is not one of this frontend: list its name in the dashboard's `hosts`"


def foreign_page(http: web.Request) -> str:
    """What tells that a page of another site has sent a request; empty if nothing does."""
    if http.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return "a page of another site has sent this"
    origin = http.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != http.headers.get("Host"):
        return "a page of another origin has sent this"
    return ""


def _host_of(url: str) -> str | None:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return None
    return host.lower() if host else None
