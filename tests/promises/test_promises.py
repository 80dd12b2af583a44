"""The tables beside this file name tests that exist, for everything that is promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
#: Each table with how many promises it has at least.
TABLES = {
    "backend-common": 50,
    "migration": 11,
    "openai-compatibility": 51,
    "request-rejection": 36,
    "slot-tracker": 76,
    "transports": 51,
}

#: The files of all tests, by their names, which are unique; and where the checks of each kit are.
TESTS = {
    path.name: path
    for top in ("core", "runtime", "libs", "plugins", "tests")
    for path in (ROOT / top).rglob("test_*.py")
}
KITS = ROOT / "libs" / "testing" / "src" / "dynamo_testing"
CHECKS = {
    "TransportKit": [*(KITS / "transport").glob("*.py"), KITS / "transport_kit.py"],
    "EventsKit": [*(KITS / "events").glob("*.py"), KITS / "events_kit.py"],
    "BrokeredTransportKit": [*(KITS / "brokered").glob("*.py"), KITS / "brokered_kit.py"],
    "DamageChecks": [KITS / "transport" / "damage.py"],
    "DiscoveryKit": [*(KITS / "discovery").glob("*.py"), KITS / "discovery_kit.py"],
}
NAME = r"`(?:[\w/]+/)?(\w+(?:\.py)?)::((?:test|Test)\w+)`"
#: What may show a promise to engines in place of a test: a command to type, or another page.
OTHERWISE = r"`python -m |\]\("


def rows(table: str) -> list[list[str]]:
    """Return the cells of each promise; the last one has the tests."""
    lines = (FOLDER / f"{table}.md").read_text().splitlines()
    found = [
        line.strip("|").split("|")
        for line in lines
        if re.match(r"\| (?!---|Promise |What happens |Name |`BackendError.` )", line)
    ]
    # Other tables of a page have fewer cells.
    width = 3 if table == "openai-compatibility" else 2
    return [[cell.strip() for cell in row] for row in found if len(row) >= width]


def named_by(table: str) -> set[tuple[str, str]]:
    return {test for row in rows(table) for test in re.findall(NAME, row[-1])}


@pytest.mark.parametrize("table", TABLES)
def test_every_promise_names_its_test(table: str) -> None:
    shown = [row[-1] for row in rows(table)]
    if table == "backend-common":
        shown = [cell for cell in shown if not re.search(OTHERWISE, cell)]
        assert [cell for cell in shown if not re.search(NAME, cell)] == []
    else:
        assert [cell for cell in shown if not re.fullmatch(rf"{NAME}(, {NAME})*", cell)] == []
    assert len(rows(table)) >= TABLES[table]


@pytest.mark.parametrize("table", TABLES)
def test_every_test_that_is_named_is_there(table: str) -> None:
    missing = [
        f"{where}::{test}"
        for where, test in sorted(named_by(table))
        if not any(
            re.search(rf"^ *((async )?def |class |(?=Test)){test}\b", file.read_text(), re.MULTILINE)
            for file in CHECKS.get(where) or [TESTS[where]]
        )
    ]

    assert missing == []


def test_promises_of_the_transports_page_match_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "transports.md").read_text()
    tables = re.findall(r"^\| What happens \| What is promised \|\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    promised = [line.strip("| ").split(" | ")[0] for table in tables for line in table.splitlines()]

    assert promised == [row[0] for row in rows("transports")]


def test_no_test_of_request_rejection_is_left_out() -> None:
    file = "test_request_rejection.py"
    tests = set(re.findall(r"^def (test_\w+)\(", TESTS[file].read_text(), re.MULTILINE))
    beyond = {
        "test_all_choices_of_one_request_are_admitted_together",
        "test_absent_thresholds_stay_and_null_switches_off",
    }

    assert {(file, test) for test in tests - beyond} <= named_by("request-rejection")
    assert not {(file, test) for test in beyond} & named_by("request-rejection")
