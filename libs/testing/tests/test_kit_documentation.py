"""The page for authors names every kit and everything an author may answer."""

from __future__ import annotations

import re
from pathlib import Path

import dynamo_testing
import pytest
from dynamo_testing.admission_kit import AdmissionKit
from dynamo_testing.brokered_kit import BrokeredTransportKit
from dynamo_testing.discovery_kit import DiscoveryKit
from dynamo_testing.engine_kit import EngineConformance
from dynamo_testing.events_kit import EventsKit
from dynamo_testing.extension_kit import ExtensionKit
from dynamo_testing.frontend_kit import FrontendKit
from dynamo_testing.parser_kit import ReasoningParserKit, ToolParserKit
from dynamo_testing.response_store_kit import ResponseStoreKit
from dynamo_testing.router_kit import RouterKit
from dynamo_testing.transport.damage import DamageChecks
from dynamo_testing.transport_kit import TransportKit

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "kits.md").read_text()

KITS: list[type] = [
    EngineConformance,
    TransportKit,
    EventsKit,
    BrokeredTransportKit,
    DamageChecks,
    DiscoveryKit,
    AdmissionKit,
    RouterKit,
    FrontendKit,
    ExtensionKit,
    ResponseStoreKit,
    ToolParserKit,
    ReasoningParserKit,
]


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.__name__)
def test_a_kit_is_named_with_where_it_is_imported_from(kit: type) -> None:
    module = "dynamo_testing" if kit.__name__ in dynamo_testing.__all__ else kit.__module__

    assert f"| `{module}.{kit.__name__}` |" in PAGE


def test_every_answer_of_an_author_is_in_the_table_and_no_other() -> None:
    answers = {name for kit in KITS for name in dir(kit) if name.isupper()}

    cells = re.findall(r"^\| (`[A-Z_]+`.*?) \|", PAGE, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)} == answers
