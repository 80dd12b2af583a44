"""The route: one path of a listener, and the handler that a plugin contributes for it."""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dynamo_core.errors import Problem

if TYPE_CHECKING:
    # A module that only describes routes needs no web server.
    from aiohttp import web

HttpHandler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
#: Whose request this is; None if that is not known.
OperatorCheck: TypeAlias = "Callable[[web.Request], str | None]"
#: Words an error in the body of an API.
ErrorResponse: TypeAlias = "Callable[[Problem], web.Response]"

_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class ListenerName(enum.StrEnum):
    """The listener of a route: the public one, or the one for operators."""

    PUBLIC = "public"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route that a plugin contributes. `summary` is one line for the route list.

    The handler reads a body with `read`, `text` or `json` of the request, which unpack what the client has packed.

    `respond_error` words the answers of the listener in place of the handler: to a caller that may not call it, and to
    an error that it raises. Without it the listener words them. A route with `before_ready` is served while the process
    still starts; other routes answer 503 then. Unless a route is `guarded`, callers need not show the key or the token
    of its listener: its handler checks who calls. An operators' route that `acts` changes something for all clients:
    where no token is configured, it serves callers on this host only, and no pages of a browser. Several APIs may serve
    one path, each in its own form, if all but one name the `header` by which their clients are known.
    """

    method: str
    path: str
    handler: HttpHandler
    summary: str = ""
    listener: ListenerName = ListenerName.PUBLIC
    respond_error: ErrorResponse | None = None
    before_ready: bool = False
    guarded: bool = True
    acts: bool = False
    header: str = ""

    @property
    def claim(self) -> str:
        """The method and path that one API alone may serve, and the header that tells its form apart."""
        return " ".join(filter(None, (self.method, self.path, self.header)))

    @property
    def display_path(self) -> str:
        """The path for people: variables without their patterns, ``/models/{id}``."""
        return _VARIABLE.sub(r"{\1}", self.path)
