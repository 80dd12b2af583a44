"""The origin of a request: routes without a token serve programs, and no page of another site.

A page of another site can have a browser send a request to this host, and can make a name of its own lead here. Such a
request has an ``Origin`` if it can change something, and a ``Host`` with that name.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import replace
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.errors import Problem

from dynamo_http.errors import error_response

_OWN_NAMES = frozenset({"localhost", "localhost.", socket.gethostname().lower()})
#: Headers that browsers send and programs do not.
_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
_REMEDY = "without a token, this is for programs{}: set a token, and send it as `Authorization: Bearer TOKEN`"


def foreign_page(http: web.Request, hosts: Collection[str] = ()) -> str:
    """Return the reason to take a request for one of another site's page; empty if there is none.

    `hosts` are the names by which the process is called, beside addresses, ``localhost`` and the name of the host. A
    link that leads here is no fault.
    """
    headers = http.headers
    host = headers.get("Host", "")
    if not _is_own(host, hosts):
        return "The host that was asked for is not one of this process"
    is_link = http.method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate"
    if not is_link and headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return "A page of another site has sent this"
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        return "A page of another origin has sent this"
    return ""


def refuse_pages(route: HttpRoute) -> HttpRoute:
    """Return a route that changes something without a token, closed to pages of other sites.

    One that `acts` is closed to all pages, and to other hosts. Routes that only show something stay as they are.
    """
    handler = route.handler
    if route.method == "GET":
        return route

    async def handle(http: web.Request) -> web.StreamResponse:
        local, headers = is_on_this_host(http.remote), http.headers
        fault = ""
        if route.acts and (not local or "Origin" in headers):
            fault = "Not allowed; " + _REMEDY.format(" on the host of the frontend")
        # Another host may know this one by any name.
        elif (local or any(name in headers for name in _OF_BROWSERS)) and (reason := foreign_page(http)):
            fault = f"{reason}; " + _REMEDY.format("")
        if fault:
            return (route.respond_error or error_response)(Problem(HTTPStatus.FORBIDDEN, fault, "forbidden"))
        return await handler(http)

    return replace(route, handler=handle)


def is_on_this_host(address: str | None) -> bool:
    """Return whether the address of a peer is one of the loopback."""
    known = _address(address or "")
    mapped = known.ipv4_mapped if isinstance(known, IPv6Address) else None
    return known is not None and (mapped or known).is_loopback


def _is_own(host: str, hosts: Collection[str]) -> bool:
    """Return whether a ``Host`` names this process. An address does, as no site can make one lead elsewhere."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in _OWN_NAMES or name in hosts or _address(name) is not None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
