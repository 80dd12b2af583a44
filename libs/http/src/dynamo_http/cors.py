"""Cross-origin requests: the CORS headers for pages of other origins. Off unless the settings name some."""

from __future__ import annotations

import re
from collections.abc import Collection
from http import HTTPStatus

from aiohttp import web

#: Seconds that a browser may remember the answer to a preflight.
MAX_AGE = 600
_METHODS = "GET, POST"
#: What a page may read of an answer beside its body.
_EXPOSED = "Retry-After, X-Request-Id"
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Cors:
    """The origins whose pages may ask and read the answers. Cookies are never sent along."""

    def __init__(self, origins: Collection[str]) -> None:
        # Browsers send them in lower case; a config may have been written by hand.
        self._origins = frozenset(origin.lower() for origin in origins)

    def preflight(self, http: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks beforehand.

        None if the request is no such question, or of a stranger.
        """
        wished = http.headers.get("Access-Control-Request-Method")
        if http.method != "OPTIONS" or wished is None or not self._knows(http):
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(MAX_AGE)}
        names = http.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(names):
            # Client libraries send headers of their own; none of them can do harm that the key does not prevent.
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)

    async def mark(self, http: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser whether the page may read this answer."""
        headers = response.headers
        # Caches must not give the answer for one origin to another.
        headers.add("Vary", "Origin")
        if self._knows(http):
            headers["Access-Control-Allow-Origin"] = http.headers["Origin"]
            headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _knows(self, http: web.Request) -> bool:
        return http.headers.get("Origin", "").lower() in self._origins
