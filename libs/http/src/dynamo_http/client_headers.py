"""Request headers that identify the caller, as the settings name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiohttp import web
from dynamo_core import HttpRoute, Principal
from dynamo_core.errors import InvalidArgument

from dynamo_http.settings import HttpSettings

#: The most characters of the name of a session.
MAX_SESSION = 256
#: Control characters, and halves of surrogate pairs, which no UTF-8 has.
_NOT_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_session(session: str, field: str) -> str:
    """Return the name of a session, if it can be one. `field` is where the client gave it.

    Raises:
        InvalidArgument: it is too long, or holds control characters.
    """
    if len(session) > MAX_SESSION:
        raise InvalidArgument(f"`{field}` must have at most {MAX_SESSION} characters, got {len(session)}", field=field)
    return _check_text(session, field)


def _check_text(value: str, field: str) -> str:
    if _NOT_TEXT.search(value):
        raise InvalidArgument(f"`{field}` must be text without control characters", field=field)
    return value


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """Names are lower-case. `session` is the header that names the session; `chosen` are those that plugins see."""

    session: str | None
    chosen: tuple[str, ...]

    def of(self, http: web.BaseRequest, principal: Principal) -> Principal:
        """Return the principal with what the headers of its request say.

        Raises:
            InvalidArgument: one holds what cannot be passed on; the error names it.
        """
        headers = http.headers
        session = check_session(headers.get(self.session, ""), self.session) if self.session else ""
        chosen: Mapping[str, str] = {
            name: _check_text(", ".join(headers.getall(name)), name) for name in self.chosen if name in headers
        }
        if not session and not chosen:
            return principal
        return replace(principal, session=session, headers=chosen)


#: The key under which the listener stores them in a request, if the settings name any.
CLIENT_HEADERS = web.RequestKey("dynamo.client_headers", ClientHeaders)


def client_headers(settings: HttpSettings) -> ClientHeaders | None:
    """Return the headers that the settings name; None if they name none."""
    if settings.session_header is None and not settings.forward_headers:
        return None
    return ClientHeaders(settings.session_header, settings.forward_headers)


def with_client_headers(route: HttpRoute, named: ClientHeaders) -> HttpRoute:
    """Return the route, whose handler finds out with `principal_of` what these headers say."""
    handler = route.handler

    async def handle(http: web.Request) -> web.StreamResponse:
        http[CLIENT_HEADERS] = named
        return await handler(http)

    return replace(route, handler=handle)
