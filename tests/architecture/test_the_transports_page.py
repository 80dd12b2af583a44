"""docs/transports.md names every transport and store, tests that exist, and kits that all of them run in full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transports.md").read_text()

KITS = ROOT / "core" / "src" / "dynamo_core" / "testing"
#: Where the checks of each kit are.
CHECKS = {
    "TransportKit": [*(KITS / "transport").glob("*.py"), KITS / "transport_kit.py"],
    "EventsKit": [*(KITS / "events").glob("*.py"), KITS / "events_kit.py"],
    "DiscoveryKit": [*(KITS / "discovery").glob("*.py"), KITS / "discovery_kit.py"],
}
#: What a kit leaves out unless a plugin's class says that it can.
TRANSPORT_POWERS = ("CAN_BREAK_CONNECTION", "CAN_GO_DEAF", "CAN_LOSE_AN_ITEM", "CAN_SERVE_ELSEWHERE", "ITEM_LIMIT")
STORE_POWERS = ("CAN_KILL_OWNER", "CAN_CUT_STORE")

#: The files of all tests, by their names, which are unique.
TESTS = {path.name: path for top in ("core", "plugins", "tests") for path in (ROOT / top).rglob("test_*.py")}


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """The page's tables: the last word of the header, and the cells of each row."""
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
        yield head[-1].strip(" |"), rows


PROMISES = [row for last, rows in tables() if last == "Shown by" for row in rows]
SHOWN = sorted({name for row in PROMISES for name in re.findall(r"`(\S+::\w+)`", row[-1])})


def plugins(kind: str) -> set[str]:
    return {path.parent.name for path in (ROOT / "plugins" / kind).glob("*/pyproject.toml")}


def chosen(section: str) -> set[str]:
    """The names in the first column of a section's table."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))


def test_every_promise_names_what_shows_it() -> None:
    assert len(PROMISES) > 50
    name = r"`\w+(\.py)?::test_\w+`"
    assert [row for row in PROMISES if len(row) != 3 or not re.fullmatch(rf"{name}(, {name})* ?\|?", row[-1])] == []


@pytest.mark.parametrize("shown", SHOWN)
def test_the_test_is_there(shown: str) -> None:
    where, _, test = shown.partition("::")
    files = CHECKS[where] if where in CHECKS else [TESTS[where]]

    assert any(re.search(rf"^ *(async )?def {test}\(", file.read_text(), re.MULTILINE) for file in files)


@pytest.mark.parametrize(("section", "kind"), [("Transports", "transports"), ("Stores", "discovery")])
def test_there_is_a_row_for_every_plugin_and_for_no_other(section: str, kind: str) -> None:
    assert chosen(section) == plugins(kind)


def written_for(kind: str, name: str) -> str:
    return "\n".join(path.read_text() for path in (ROOT / "plugins" / kind / name / "tests").glob("test_*.py"))


@pytest.mark.parametrize("name", sorted(plugins("transports")))
def test_every_transport_is_held_to_the_kits(name: str) -> None:
    text = written_for("transports", name)

    assert "(TransportKit):" in text
    assert "(EventsKit):" in text
    # There is no way between caller and worker on which something could be lost in one process.
    powers = () if name == "inproc" else TRANSPORT_POWERS
    assert [power for power in powers if not re.search(rf"{power}\b.* = (True|\d)", text)] == []


@pytest.mark.parametrize("name", sorted(plugins("discovery")))
def test_every_store_is_held_to_the_kit(name: str) -> None:
    text = written_for("discovery", name)

    assert "(DiscoveryKit):" in text
    powers = () if name == "memory" else STORE_POWERS
    assert [power for power in powers if not re.search(rf"{power}\b.* = True", text)] == []
