"""The kit of each kind, with fixtures for a plugin that is known only by its name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from dynamo_core.contracts.admission import Admission
from dynamo_core.plugins.loader import PluginLoader
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit
from dynamo_testing.discovery_kit import Directories, DiscoveryKit
from dynamo_testing.events_kit import EventPlanes, EventsKit
from dynamo_testing.extension_kit import ExtensionFactory, ExtensionKit
from dynamo_testing.frontend_kit import Asked, FrontendFactory, FrontendKit
from dynamo_testing.installed.subject import subject
from dynamo_testing.optional_packages import pytest
from dynamo_testing.parser_kit import (
    ReasoningParserFactory,
    ReasoningParserKit,
    ToolParserFactory,
    ToolParserKit,
)
from dynamo_testing.response_store_kit import ResponseStoreFactory, ResponseStoreKit
from dynamo_testing.router_kit import RouterFactory, RouterKit
from dynamo_testing.transport_kit import Planes, TransportKit


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Any, Any]]:
    """Yield two started plugins that meet in a server or a store; one and the same if it serves one process only."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2 if subject().cls.CROSS_PROCESS else 1):
            made.append(await stack.enter_async_context(subject().cls(subject().config, Metrics())))
            await made[-1].start()
        yield made[0], made[-1]


class TestRouter(RouterKit):
    """The kit for the router under check."""

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: subject().cls(subject().config, services)


class TestAdmission(AdmissionKit):
    """The kit for the admission under check."""

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return lambda services: subject().cls(subject().config, services)

    def held(self, admission: Admission) -> int:
        pytest.skip("what an admission holds cannot be known from outside: its own tests write the method `held`")


class TestTransport(TransportKit):
    """The kit for the transport under check."""

    @pytest.fixture
    def planes(self, pair: tuple[Any, Any]) -> Planes:
        return Planes(*pair)


class TestEvents(EventsKit):
    """The kit for the event plane of a transport under check."""

    @pytest.fixture
    async def events(self, pair: tuple[Any, Any]) -> AsyncIterator[EventPlanes]:
        directory_class: Any = PluginLoader().load("discovery", "memory")
        async with directory_class(directory_class.Config(), Metrics()) as directory:
            yield EventPlanes(pair[0].events(), pair[1].events(), directory)


class TestDiscovery(DiscoveryKit):
    """The kit for the discovery under check."""

    @pytest.fixture
    def directories(self, pair: tuple[Any, Any]) -> Directories:
        return Directories(*pair)


class TestFrontend(FrontendKit):
    """The kit for the frontend under check."""

    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: subject().cls(subject().config, services)

    def ask(self, model: str, prompt: str) -> Asked:
        return worded(subject().request, model, prompt, "--request")

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        return worded(subject().streaming_request, model, prompt, "--streaming-request")


class TestExtension(ExtensionKit):
    """The kit for the extension under check."""

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        return lambda services: subject().cls(subject().config, services)


class TestResponseStore(ResponseStoreKit):
    """The kit for the response store under check."""

    @pytest.fixture
    def make_store(self) -> ResponseStoreFactory:
        return lambda services: subject().cls(subject().config, services)


class TestToolParser(ToolParserKit):
    """The kit for the parser of tool calls under check."""

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        factory: ToolParserFactory = subject().cls
        return factory


class TestReasoningParser(ReasoningParserKit):
    """The kit for the parser of reasoning under check."""

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        factory: ReasoningParserFactory = subject().cls
        return factory


def worded(template: str, model: str, prompt: str, option: str) -> Asked:
    """Return a request in the words of the command line."""
    if not template:
        pytest.skip(f"{option} is not given: the kit has no words for a request")
    method, path, body = template.split(maxsplit=2)
    filled = body.replace("MODEL", json.dumps(model)[1:-1]).replace("PROMPT", json.dumps(prompt)[1:-1])
    return Asked(method, path, json.loads(filled))


#: The classes of checks for each kind.
CHECKS: dict[str, tuple[type, ...]] = {
    "router": (TestRouter,),
    "admission": (TestAdmission,),
    "transport": (TestTransport, TestEvents),
    "discovery": (TestDiscovery,),
    "frontend": (TestFrontend,),
    "extension": (TestExtension,),
    "response_store": (TestResponseStore,),
    "tool_parser": (TestToolParser,),
    "reasoning_parser": (TestReasoningParser,),
}
