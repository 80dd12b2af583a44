"""Authentication: API keys for models, and one token for operators.

The process knows hashes only. Keys are long and random, so that one round of SHA-256 is enough; it would not be for
passwords.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from http import HTTPStatus

from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute, OperatorCheck
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.errors import ConfigError, Problem

from dynamo_http.errors import error_response
from dynamo_http.origins import refuse_pages
from dynamo_http.request_identity import PRINCIPAL
from dynamo_http.settings import AuthSettings

#: What a hash in the settings begins with.
PREFIX = "sha256:"
#: Shorter ones could be guessed from their hashes.
SHORTEST = 16

MISSING, UNKNOWN = "missing", "unknown"

#: What operators change.
audit = logging.getLogger("dynamo.audit")

_BEARER = "bearer "


def new_key() -> str:
    """Return a key with 256 random bits."""
    return f"dyn-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """Return a key as the settings hold it."""
    return PREFIX + _digest(key).hex()


def _digest(key: str) -> bytes:
    # A header may hold bytes that are no text; they come as surrogates.
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stored(where: str, secret: str) -> bytes:
    """Return the digest of a key that is given as such or as its hash."""
    if secret.startswith(PREFIX):
        try:
            digest = bytes.fromhex(secret.removeprefix(PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != sha256().digest_size:
            raise ConfigError(f"{where}: is not `{PREFIX}` and 64 hexadecimal digits, as `dynamo key new` prints it")
        return digest
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"{where}: has fewer than {SHORTEST} characters; `dynamo key new` makes one that is long enough"
        )
    return _digest(secret)


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    principal: Principal


class _Guard(ABC):
    """A guard of routes by a key. `failed` gets the reason of each refusal: ``missing`` or ``unknown``.

    `missing` and `unknown` are what the caller is told then.
    """

    def __init__(
        self,
        failed: Callable[[str], None],
        missing: str = "No API key was sent. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
        unknown: str = "The API key is not known",
    ) -> None:
        self._failed = failed
        self._texts = {MISSING: missing, UNKNOWN: unknown}

    def protect(self, route: HttpRoute) -> HttpRoute:
        """Return the route, for requests with a key; its handler finds out with `principal_of` whose it is."""
        handler = route.handler

        async def handle(http: web.Request) -> web.StreamResponse:
            presented = _presented(http)
            principal = None if presented is None else self._identify(presented)
            if principal is None:
                why = MISSING if presented is None else UNKNOWN
                self._failed(why)
                return _unauthorized(route, self._texts[why], presented is None)
            http[PRINCIPAL] = principal
            return await handler(http)

        return replace(route, handler=handle)

    def knows(self, http: web.Request) -> bool:
        """Return whether a request has a key that opens these routes."""
        presented = _presented(http)
        return presented is not None and self._identify(presented) is not None

    @abstractmethod
    def _identify(self, presented: str) -> Principal | None: ...


class ApiKeys(_Guard):
    """The keys of the settings."""

    def __init__(self, keys: Sequence[_Known], failed: Callable[[str], None]) -> None:
        super().__init__(failed)
        self._keys = keys

    @classmethod
    def load(
        cls, settings: AuthSettings, env: Mapping[str, str], failed: Callable[[str], None] = lambda _: None
    ) -> ApiKeys | None:
        """Return the keys of the settings; None if there are none. `env` holds those that are given as variables.

        Raises:
            ConfigError: a variable is not set or holds no key, or two entries hold one key.
        """
        known: dict[bytes, _Known] = {}
        for index, key in enumerate(settings.keys):
            where = f"auth.keys[{index}]"
            if key.env is not None and not env.get(key.env):
                raise ConfigError(f"{where}.env: environment variable '{key.env}' is not set")
            digest = _stored(f"{where}.env: '{key.env}'", env[key.env]) if key.env else _stored(where, key.hash or "")
            if digest in known:
                raise ConfigError(f"{where}: is the same key as that of {known[digest].principal.key_id!r}")
            models = None if key.models is None else frozenset(key.models)
            principal = Principal(key_id=key.id, tenant=key.tenant, priority=key.priority, models=models)
            known[digest] = _Known(digest, principal)
        return cls(tuple(known.values()), failed) if known else None

    def take(self, other: ApiKeys | None) -> None:
        """Know the keys of another one from now on, and no others; none if there is none."""
        self._keys = () if other is None else other._keys

    def _identify(self, presented: str) -> Principal | None:
        digest = _digest(presented)
        found = None
        for known in self._keys:
            # To the end, whichever it is: the time tells nothing.
            if hmac.compare_digest(known.digest, digest):
                found = known.principal
        return found


class AdminToken(_Guard):
    """The operators' token. `secret` is the token or its hash; `failed` as for `ApiKeys`; `where` names it in messages.

    Raises:
        ConfigError: it is too short to be one.
    """

    def __init__(
        self, secret: str, failed: Callable[[str], None] = lambda _: None, *, where: str = "admin.token"
    ) -> None:
        super().__init__(
            failed,
            f"This asks for {where}. Send it as `Authorization: Bearer TOKEN`; "
            "commands take --token or DYN_ADMIN_TOKEN",
            f"This is not the {where} that is asked for",
        )
        self._where = where
        self._digest = _stored(where, secret)

    def opens(self, presented: str) -> bool:
        """Return whether a text is the token."""
        return self._identify(presented) is not None

    def take(self, secret: str) -> None:
        """Ask for another token from now on.

        Raises:
            ConfigError: it is too short to be one.
        """
        self._digest = _stored(self._where, secret)

    def _identify(self, presented: str) -> Principal | None:
        return _OPERATOR if hmac.compare_digest(self._digest, _digest(presented)) else None


_OPERATOR = Principal(key_id="admin")
_LOCAL = Principal(key_id="local")


class Operators:
    """Access to the operators' routes: callers with the token, and those that an extension's check accepts."""

    def __init__(self, token: AdminToken | None) -> None:
        self.token = token
        self._checks: list[OperatorCheck] = []

    def accept(self, check: OperatorCheck) -> None:
        """Ask a check too, before the token."""
        self._checks.append(check)

    def protect(self, route: HttpRoute) -> HttpRoute:
        """Return a route for operators. Every request to change something is told in the log, with who has sent it."""
        if not route.guarded:
            return route
        route = route if route.method == "GET" else _audited(route)
        closed = refuse_pages(route) if self.token is None else self.token.protect(route)

        async def handle(http: web.Request) -> web.StreamResponse:
            name = next((name for check in self._checks if (name := check(http)) is not None), None)
            if name is None:
                return await closed.handler(http)
            http[PRINCIPAL] = Principal(key_id=name)
            return await route.handler(http)

        return replace(route, handler=handle)


def _audited(route: HttpRoute) -> HttpRoute:
    handler = route.handler

    async def handle(http: web.Request) -> web.StreamResponse:
        outcome = "failed"
        try:
            response = await handler(http)
            outcome = str(response.status)
            return response
        finally:
            who = http.get(PRINCIPAL, _LOCAL).key_id
            audit.info("operator %s at %s: %s %s: %s", who, http.remote, http.method, http.path, outcome)

    return replace(route, handler=handle)


def _presented(http: web.Request) -> str | None:
    """Return the key of a request; None if there is none, or more than one that could be meant."""
    headers = http.headers
    given = headers.getall("Authorization", ())
    if len(given) == 1 and given[0][: len(_BEARER)].lower() == _BEARER:
        return given[0][len(_BEARER) :].strip() or None
    keys = headers.getall("x-api-key", ())
    return keys[0].strip() or None if len(keys) == 1 and not given else None


def _unauthorized(route: HttpRoute, message: str, missing: bool) -> web.Response:
    problem = Problem(HTTPStatus.UNAUTHORIZED, message, "unauthorized", code=None if missing else "invalid_api_key")
    response = (route.respond_error or error_response)(problem)
    response.headers["WWW-Authenticate"] = "Bearer" if missing else 'Bearer error="invalid_token"'
    return response
