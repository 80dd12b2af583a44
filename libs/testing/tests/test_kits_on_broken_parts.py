"""Every check of the kits fails for a part that breaks its promise, and no broken part fails any other check."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from dynamo_testing.admission_kit import AdmissionKit
from dynamo_testing.brokered_kit import BrokeredTransportKit
from dynamo_testing.discovery_kit import DiscoveryKit
from dynamo_testing.events_kit import EventsKit
from dynamo_testing.extension_kit import ExtensionKit
from dynamo_testing.frontend_kit import FrontendKit
from dynamo_testing.parser_kit import ReasoningParserKit, ToolParserKit
from dynamo_testing.response_store_kit import ResponseStoreKit
from dynamo_testing.router_kit import RouterKit
from dynamo_testing.transport.damage import DamageChecks
from dynamo_testing.transport_kit import TransportKit

#: Hundreds of checks, each of which waits for something that will not come.
pytestmark = pytest.mark.full

HERE = Path(__file__).parent
#: Which files have broken parts for which kit.
KITS: dict[type, list[str]] = {
    EventsKit: ["broken_events"],
    DiscoveryKit: ["broken_discoveries"],
    TransportKit: ["broken_transports", "broken_hangs"],
    BrokeredTransportKit: ["broken_brokers"],
    DamageChecks: ["broken_damage"],
    AdmissionKit: ["broken_admissions"],
    RouterKit: ["broken_routers"],
    FrontendKit: ["broken_frontends"],
    ExtensionKit: ["broken_extensions"],
    ResponseStoreKit: ["broken_response_stores"],
    ToolParserKit: ["broken_parsers"],
    ReasoningParserKit: ["broken_reasoning_parsers"],
}
FILES = [name for names in KITS.values() for name in names]


def failures(report: Path) -> dict[str, set[str]]:
    """Return the names of the checks that failed, by class."""
    failed: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        of_class = failed.setdefault(case.attrib["classname"].split(".")[-1], set())
        if case.find("failure") is not None or case.find("error") is not None:
            of_class.add(case.attrib["name"].split("[")[0])
    return failed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Yield each file run by a pytest of its own, as its author would, all at once: they mostly wait."""
    started = {}
    try:
        for name in FILES:
            report = tmp_path_factory.mktemp(name) / "report.xml"
            options = "-q --tb=line -p no:cacheprovider --import-mode=importlib -o asyncio_mode=auto -c /dev/null"
            place = ["--rootdir", str(HERE), f"--junitxml={report}", str(HERE / f"{name}.py")]
            command = [sys.executable, "-m", "pytest", *options.split(), *place]
            # From here the parts import what makes them.
            running = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE.parents[2]
            )
            started[name] = (running, report)
        yield started
    finally:
        for running, _ in started.values():
            running.kill()
            running.communicate()


def load(name: str) -> dict[str, Any]:
    """Return what a file of broken parts defines."""
    return runpy.run_path(str(HERE / f"{name}.py"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FILES)
def test_each_broken_part_fails_the_checks_of_its_promise_and_no_others(
    name: str, runs: dict[str, tuple[subprocess.Popen[str], Path]]
) -> None:
    parts = load(name)
    running, report = runs[name]

    output, _ = running.communicate(timeout=300)
    assert running.returncode == 1, output
    failed = failures(report)

    expected = {class_name: set(parts[class_name].FAILS) for class_name in failed}
    assert failed == expected, output


@pytest.mark.parametrize(("kit", "names"), KITS.items())
def test_every_check_is_known_to_fail_for_some_broken_part(kit: type, names: list[str]) -> None:
    parts = [part for name in names for part in load(name).values()]
    checks = {check for check in dir(kit) if check.startswith("test_")}

    found = set().union(*(part.FAILS for part in parts if hasattr(part, "FAILS")))

    assert checks - found == set()
    assert found <= checks
