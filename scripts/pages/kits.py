"""The sections on testing: the kits, the attributes of their classes, and faults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import dynamo_testing
from dynamo_testing.admission_kit import AdmissionKit
from dynamo_testing.brokered_kit import BrokeredTransportKit
from dynamo_testing.discovery_kit import DiscoveryKit
from dynamo_testing.engine_kit import EngineConformance
from dynamo_testing.events_kit import EventsKit
from dynamo_testing.extension_kit import ExtensionKit
from dynamo_testing.faults import Fault, kinds
from dynamo_testing.frontend_kit import FrontendKit
from dynamo_testing.parser_kit import ReasoningParserKit, ToolParserKit
from dynamo_testing.response_store_kit import ResponseStoreKit
from dynamo_testing.router_kit import RouterKit
from dynamo_testing.transport.damage import DamageChecks
from dynamo_testing.transport_kit import TransportKit

from scripts.pages.tables import code, described, field_rows, table

KITS: dict[type, str] = {
    EngineConformance: "engine",
    TransportKit: "transport",
    EventsKit: "events",
    BrokeredTransportKit: "brokered transport",
    DamageChecks: "damage",
    DiscoveryKit: "discovery",
    RouterKit: "router",
    FrontendKit: "frontend",
    ExtensionKit: "extension",
    ResponseStoreKit: "response store",
    ToolParserKit: "tool parser",
    ReasoningParserKit: "reasoning parser",
    AdmissionKit: "admission",
}


#: A fixture that authors write, with the first words about it.
_FIXTURE = re.compile(r'def (\w+)\(self\)[^:]*:\n +"""([^"]*) Every author writes this one\.')


def _kits() -> str:
    def row(kit: type) -> tuple[str, str, str]:
        module = "dynamo_testing" if kit.__name__ in dynamo_testing.__all__ else kit.__module__
        summary = (inspect.getdoc(inspect.getmodule(kit)) or "").partition("\n\n")[0]
        sources = "".join(inspect.getsource(base) for base in kit.__mro__[:-1])
        fixtures = (f"{code(name)}: {text}" for name, text in _FIXTURE.findall(sources))
        return code(f"{module}.{kit.__name__}"), " ".join(summary.split()), " ".join(fixtures)

    return table(("Kit", "Checks", "Fixture to write"), map(row, KITS))


def _attributes() -> str:
    found: dict[tuple[str, str], list[str]] = {}
    for kit, word in KITS.items():
        for base in reversed(kit.__mro__[:-1]):
            for row in field_rows(base):
                known = found.setdefault(row, [])
                known += [] if word in known else [word]
    return table(
        ("Attribute", "Kit", "Meaning"), ((names, ", ".join(kits), text) for (names, text), kits in found.items())
    )


def _router_checks() -> str:
    names = [name for base in RouterKit.__mro__ for name in vars(base) if name.startswith("test_")]
    return "".join(f"- {name.removeprefix('test_').replace('_', ' ')}\n" for name in names)


def _faults() -> str:
    def row(kind: type[Fault]) -> tuple[str, str]:
        arguments = ", ".join(
            name if parameter.default is parameter.empty else f"{name}={parameter.default}"
            for name, parameter in inspect.signature(kind).parameters.items()
        )
        return code(f"{kind.__name__}({arguments})"), described(kind)

    classes = (kind for kind in vars(kinds).values() if inspect.isclass(kind) and kind.__module__ == kinds.__name__)
    shipped = (kind for kind in classes if issubclass(kind, Fault) and kind is not Fault)
    return table(("Fault", "Effect"), map(row, shipped))


SECTIONS: dict[str, Callable[[], str]] = {
    "kits": _kits,
    "kit-attributes": _attributes,
    "router-checks": _router_checks,
    "faults": _faults,
}
