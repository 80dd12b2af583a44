"""The extension `dashboard`: serves the page, and lets in browsers that are logged in."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from importlib.resources import files
from math import ceil
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web
from dynamo_core import Extension, ExtensionServices, HttpFault, HttpRoute, ListenerName, PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_http import foreign_page, is_on_this_host
from pydantic import Field, SecretStr

from dynamo_plugin_extension_dashboard.sessions import OPERATOR, VIEWER, FailedLogins, Session, Sessions, same

PATH: Final = "/dashboard"
#: What changes something has this header, with the text that `/dashboard/session` tells.
CSRF: Final = "x-csrf-token"
#: Bytes of a login.
_LOGIN: Final = 8192
#: Characters of a token, so that it cannot be guessed.
_SHORTEST: Final = 16

_VENDORED: Final = "vendor/uPlot-1.6.32.min"
#: The files of the page and their types.
_FILES: Final = {
    "index.html": "text/html",
    "icon.svg": "image/svg+xml",
    "style.css": "text/css",
    "main.js": "text/javascript",
    "acts.js": "text/javascript",
    "charts.js": "text/javascript",
    "dom.js": "text/javascript",
    "views.js": "text/javascript",
    f"{_VENDORED}.js": "text/javascript",
    f"{_VENDORED}.css": "text/css",
}

#: What keeps other pages away from this one, and this one from other hosts.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class DashboardConfig(PluginConfig):
    """The keys of the extension's entry in the config file, beside `use`."""

    viewer_token: SecretStr | None = Field(
        default=None,
        min_length=_SHORTEST,
        description="Lets viewers log in, who change nothing. Operators log in with admin.token.",
    )
    hosts: list[str] = Field(
        default_factory=list, description="Names by which browsers call the admin listener, beside its addresses."
    )
    session_hours: float = Field(default=12.0, gt=0, le=720, description="How long a login holds.")


class _Login(msgspec.Struct, forbid_unknown_fields=True):
    token: str = ""


_decoder = msgspec.json.Decoder(_Login)


class DashboardExtension(Extension):
    """Serves files and logins. What the page shows and changes are routes of core and of the extension `feed`.

    Raises:
        ConfigError: viewers have the operators' token.
    """

    NAME = "dashboard"
    NEEDS = ("feed",)
    NEEDS_ADMIN_PORT = True
    Config = DashboardConfig
    config: DashboardConfig

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        super().__init__(config, services)
        viewer = self.config.viewer_token
        if viewer is not None and services.admin.opens(viewer.get_secret_value()):
            raise ConfigError(
                f"extensions.{services.name}.viewer_token: is the same as admin.token, so that viewers would be "
                "operators: give viewers another token"
            )
        self._hosts = frozenset(host.lower() for host in self.config.hosts)
        self._sessions = Sessions(self.config.session_hours * 3600)
        self._failed = FailedLogins()
        services.admin.accept(self._check)

    def routes(self) -> Iterable[HttpRoute]:
        """Yield the page and what belongs to it. Without a session one sees the login only."""
        served = {name: _File.read(name, kind) for name, kind in _FILES.items()}
        open_route = partial(HttpRoute, listener=ListenerName.ADMIN, guarded=False)
        yield open_route("GET", PATH, self._serve(served["index.html"]), "A page with all that operators watch")
        for name in _FILES:
            if name != "index.html":
                yield open_route("GET", f"{PATH}/{name}", self._serve(served[name]), "A file of the dashboard")
        yield open_route("GET", f"{PATH}/session", self._show_session, "Who is logged in at the dashboard")
        yield open_route("POST", f"{PATH}/login", self._login, "Exchanges a token for a cookie")
        yield open_route("POST", f"{PATH}/logout", self._logout, "Ends a session of the dashboard")
        yield HttpRoute(
            "GET",
            f"{PATH}/settings",
            self._settings,
            "The settings in force, and where they are from",
            ListenerName.ADMIN,
        )

    def _check(self, http: web.Request) -> str | None:
        """Return whose request it is, if it has the cookie of a session; see `AdminAccess.accept`."""
        session = self._sessions.find(http.cookies.get(_cookie_name(http)))
        if session is None or "Authorization" in http.headers:
            return None
        self._refuse_others(http)
        if http.method not in ("GET", "HEAD"):
            if session.role != OPERATOR:
                raise HttpFault(403, "viewers change nothing: log in with the operators' token")
            if not same(http.headers.get(CSRF, ""), session.csrf):
                raise HttpFault(403, f"{CSRF} is missing or wrong: load the page again")
        return session.title

    def _refuse_others(self, http: web.Request) -> None:
        if reason := foreign_page(http, self._hosts):
            raise HttpFault(403, f"{reason}; the dashboard's `hosts` lists the names of the frontend")

    def _serve(self, file: _File) -> Any:
        async def handle(http: web.Request) -> web.Response:
            self._refuse_others(http)
            if http.headers.get("If-None-Match") == file.etag:
                return web.Response(status=304, headers=_HEADERS | {"ETag": file.etag})
            return web.Response(
                body=file.content, content_type=file.kind, charset="utf-8", headers=_HEADERS | {"ETag": file.etag}
            )

        return handle

    async def _show_session(self, http: web.Request) -> web.Response:
        self._refuse_others(http)
        return self._about(self._sessions.find(http.cookies.get(_cookie_name(http))))

    async def _login(self, http: web.Request) -> web.Response:
        self._refuse_others(http)
        # The token first: wrong ones of others do not keep an operator out.
        begun = self._begin(await token_of(http), http)
        if begun is None:
            if wait := self._failed.add(http.remote):
                raise HttpFault(429, f"too many logins from this address have failed: try again in {ceil(wait)} s")
            raise HttpFault(401, "the token is not known")
        cookie, session = begun
        response = self._about(session)
        response.set_cookie(
            _cookie_name(http),
            cookie,
            max_age=int(self.config.session_hours * 3600),
            httponly=True,
            samesite="Strict",
            secure=http.secure,
            path="/",
        )
        return response

    def _begin(self, token: str, http: web.Request) -> tuple[str, Session] | None:
        """Return a session for what a caller shows; None for a wrong token."""
        admin, viewer = self.services.admin, self.config.viewer_token
        if not admin.token:
            # As for programs: who is on this host may change things, others may look.
            return self._sessions.begin(OPERATOR if is_on_this_host(http.remote) else VIEWER)
        if admin.opens(token):
            return self._sessions.begin(OPERATOR, partial(admin.opens, token))
        if viewer is not None and same(token, viewer.get_secret_value()):
            return self._sessions.begin(VIEWER)
        return None

    async def _logout(self, http: web.Request) -> web.Response:
        self._refuse_others(http)
        self._sessions.end(http.cookies.get(_cookie_name(http)))
        response = self._about(None)
        response.del_cookie(_cookie_name(http), path="/")
        return response

    def _about(self, session: Session | None) -> web.Response:
        about: dict[str, Any] = {"role": None, "asks_for_token": self.services.admin.token}
        if session is not None:
            about |= {"role": session.role, "csrf": session.csrf, "name": session.title}
        return _json(about)

    async def _settings(self, http: web.Request) -> web.Response:
        rows = [{"key": key, "value": value, "origin": origin} for key, value, origin in self.services.settings.rows()]
        return _json({"namespace": self.services.namespace, "settings": rows})


class _File(NamedTuple):
    content: bytes
    kind: str
    etag: str

    @classmethod
    def read(cls, name: str, kind: str) -> _File:
        content = files(__package__).joinpath("page", *name.split("/")).read_bytes()
        return cls(content, kind, f'"{sha256(content).hexdigest()[:32]}"')


async def token_of(http: web.Request) -> str:
    """Return what the body of a login has.

    Raises:
        HttpFault: it is too large, or no login.
    """
    body = b""
    async for piece in http.content.iter_any():
        body += piece
        if len(body) > _LOGIN:
            raise HttpFault(413, f"a login has at most {_LOGIN} bytes")
    try:
        return _decoder.decode(body).token.strip()
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise HttpFault(400, 'expected {"token": "…"}') from None


def _cookie_name(http: web.Request) -> str:
    """Return the name of this frontend's cookie: browsers share cookies between all ports of a host."""
    address = http.transport.get_extra_info("sockname") if http.transport is not None else None
    return f"dynamo_dashboard_{address[1]}" if address else "dynamo_dashboard"


def _json(value: Any) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=msgspec.json.encode(value, enc_hook=str), content_type="application/json", headers=headers)
