"""A frontend that joins several APIs on one listener."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.frontend import Frontend, FrontendServices
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web


class ApiSet(Frontend):
    """The frontends of several APIs. The first makes tokenizers, and describes templates."""

    #: The APIs by the names that the settings have for them.
    APIS: ClassVar[Mapping[str, type[Frontend]]] = {}

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        super().__init__(config, services)
        self._frontends = [api(config, services) for api in self.APIS.values()]

    def routes(self) -> Iterable[HttpRoute]:
        """Return the routes of all of them; those of one path in several forms are one route.

        Raises:
            ConfigError: two have the same.
        """
        served = [(frontend.NAME, route) for frontend in self._frontends for route in frontend.routes()]
        check_once((name, f"{route.claim} {route.listener}") for name, route in served)
        forms: dict[tuple[str, str, str], list[HttpRoute]] = {}
        # A route stands where the API put it that serves its usual form: of two that fit a path, the first is taken.
        for _, route in sorted(served, key=lambda one: bool(one[1].header)):
            forms.setdefault((route.method, route.path, route.listener), []).append(route)
        return [_one_of_forms(routes) for routes in forms.values()]

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return the claims of all of them.

        Raises:
            ConfigError: two have the same.
        """
        claimed = [(api.NAME, claim) for api in cls.APIS.values() for claim in api.claims(config)]
        check_once(claimed)
        return [claim for _, claim in claimed]

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """Make the tokenizer of a model; see `Frontend.load_tokenizer`."""
        return self._frontends[0].load_tokenizer(kind, files)

    @classmethod
    def describe_template(cls, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the forms of messages that a model's chat template reads."""
        return next(iter(cls.APIS.values())).describe_template(files)

    async def reconfigure(self, config: PluginConfig) -> None:
        """Give all of them settings that differ in live fields only."""
        for frontend in self._frontends:
            if frontend.Config.LIVE:
                await frontend.reconfigure(config)

    async def start(self) -> None:
        """Start the background work of each."""
        for frontend in self._frontends:
            await frontend.start()

    async def aclose(self) -> None:
        """Stop the background work of each, last first."""
        async with AsyncExitStack() as stack:
            for frontend in self._frontends:
                stack.push_async_callback(frontend.aclose)


def check_once(claimed: Iterable[tuple[str, str]]) -> None:
    """Check that no route is claimed twice, by APIs of these names.

    Raises:
        ConfigError: naming the route and the APIs.
    """
    taken: dict[str, str] = {}
    for name, claim in claimed:
        if claim in taken:
            method, path, *_ = claim.split(" ")
            if name == taken[claim]:
                raise ConfigError(f"frontend: {name!r} serves {method} {path} twice: set another path for one of them")
            raise ConfigError(
                f"frontend: {taken[claim]!r} and {name!r} both serve {method} {path}: "
                "set another path for one of them, or leave one out"
            )
        taken[claim] = name


def _one_of_forms(routes: Sequence[HttpRoute]) -> HttpRoute:
    """Return the route that answers each client in the form whose header it sends, else in the form without one."""
    usual = next((route for route in routes if not route.header), routes[0])
    others = [route for route in routes if route is not usual]
    if not others:
        return usual

    async def answer(request: web.Request) -> web.StreamResponse:
        return await next((route for route in others if route.header in request.headers), usual).handler(request)

    return replace(usual, handler=answer)


def api_set(apis: Mapping[str, type[Frontend]]) -> type[Frontend]:
    """Return one frontend class for these; its settings are those of all of them."""
    first = next(iter(apis.values()))
    if len(apis) == 1:
        return first
    configs = tuple(dict.fromkeys(api.Config for api in apis.values()))

    def remarks(self: PluginConfig) -> list[str]:
        return [remark for config in configs for remark in config.remarks(self)]

    live = frozenset[str]().union(*(config.LIVE for config in configs))
    config = type("FrontendConfig", configs, {"LIVE": live, "remarks": remarks, "__module__": __name__})
    uses = any(api.USES_RESPONSE_STORE for api in apis.values())
    members = {"NAME": first.NAME, "APIS": dict(apis), "Config": config, "USES_RESPONSE_STORE": uses}
    return type("Frontends", (ApiSet,), members)


def apis_of(frontend: type[Frontend]) -> Sequence[str]:
    """Return the names of the APIs that a class was made of; none if it is one itself."""
    return list(frontend.APIS) if issubclass(frontend, ApiSet) else ()
