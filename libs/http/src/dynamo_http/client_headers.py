"""Gives the handlers of routes the request headers that say who asks."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from dynamo_core.contracts.client_headers import CLIENT_HEADERS, ClientHeaders
from dynamo_core.contracts.frontend import HttpRoute
from dynamo_core.settings import HttpSettings


def client_headers(settings: HttpSettings) -> ClientHeaders | None:
    """The headers that the settings name; None if they name none."""
    if settings.session_header is None and not settings.forward_headers:
        return None
    return ClientHeaders(settings.session_header, settings.forward_headers)


def with_client_headers(route: HttpRoute, named: ClientHeaders) -> HttpRoute:
    """The route, whose handler finds out with `principal_of` what these headers say."""
    handler = route.handler

    async def handle(http: web.Request) -> web.StreamResponse:
        http[CLIENT_HEADERS] = named
        return await handler(http)

    return replace(route, handler=handle)
