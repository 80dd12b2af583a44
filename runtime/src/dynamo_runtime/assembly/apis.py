"""Several APIs on one listener: one frontend that is made of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.frontend import Frontend, FrontendServices
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.errors import ConfigError


class ApiSet(Frontend):
    """The frontends of several APIs. The first makes tokenizers, and describes templates."""

    #: The APIs by the names that the settings have for them.
    APIS: ClassVar[Mapping[str, type[Frontend]]] = {}

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        super().__init__(config, services)
        self._frontends = [api(config, services) for api in self.APIS.values()]

    def routes(self) -> Iterable[HttpRoute]:
        """The routes of all of them.

        Raises:
            ConfigError: two have the same.
        """
        taken: dict[tuple[str, str, str], str] = {}
        for frontend in self._frontends:
            for route in frontend.routes():
                key = route.method, route.path, route.listener
                if key in taken:
                    raise ConfigError(
                        f"frontend: {taken[key]!r} and {frontend.NAME!r} both serve {route.method} {route.path}: "
                        "set another path for one of them, or leave one out"
                    )
                taken[key] = frontend.NAME
                yield route

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
