"""The tables beside this file name tests that exist, for everything that is promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
#: Each table with how many promises it has at least.
TABLES = {"migration": 11, "request-rejection": 36, "slot-tracker": 76, "transports": 51}

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
NAME = r"`\w+(?:\.py)?::test_\w+`"


def rows(table: str) -> list[list[str]]:
    """The cells of each promise; the last one has the tests."""
    lines = (FOLDER / f"{table}.md").read_text().splitlines()
    found = [line.strip("|").split("|") for line in lines if re.match(r"\| (?!---|Promise |What happens )", line)]
    return [[cell.strip() for cell in row] for row in found]


def named_by(table: str) -> set[str]:
    return {test for row in rows(table) for test in re.findall(r"`(\S+::test_\w+)`", row[-1])}


@pytest.mark.parametrize("table", TABLES)
def test_every_promise_names_what_shows_it(table: str) -> None:
    assert len(rows(table)) >= TABLES[table]
    assert [row for row in rows(table) if not re.fullmatch(rf"{NAME}(, {NAME})*", row[-1])] == []


@pytest.mark.parametrize("shown", sorted({test for table in TABLES for test in named_by(table)}))
def test_the_test_is_there(shown: str) -> None:
    where, _, test = shown.partition("::")
    files = CHECKS[where] if where in CHECKS else [TESTS[where]]

    assert any(re.search(rf"^ *(async )?def {test}\(", file.read_text(), re.MULTILINE) for file in files)


def test_what_the_page_on_transports_promises_is_what_the_table_shows() -> None:
    page = (ROOT / "docs" / "reference" / "transports.md").read_text()
    tables = re.findall(r"^\| What happens \| What is promised \|\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    promised = [line.strip("| ").split(" | ")[0] for table in tables for line in table.splitlines()]

    assert promised == [row[0] for row in rows("transports")]


def test_no_test_of_request_rejection_is_left_out() -> None:
    file = "test_request_rejection.py"
    tests = set(re.findall(r"^def (test_\w+)\(", TESTS[file].read_text(), re.MULTILINE))
    beyond = {
        "test_all_answers_of_one_request_are_let_in_together",
        "test_what_is_left_out_stays_and_null_switches_off",
    }

    assert {f"{file}::{test}" for test in tests - beyond} <= named_by("request-rejection")
    assert not {f"{file}::{test}" for test in beyond} & named_by("request-rejection")
