"""docs/reference/transports.md names every transport and store, and all of them run their kits in full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dynamo_testing import brokered_kit
from dynamo_testing.discovery import stores

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "transports.md").read_text()

#: What a kit leaves out unless a plugin's class says that it can.
TRANSPORT_POWERS = ("CAN_BREAK_CONNECTION", "CAN_GO_DEAF", "CAN_LOSE_AN_ITEM", "CAN_SERVE_ELSEWHERE", "ITEM_LIMIT")
STORE_POWERS = ("CAN_KILL_OWNER", "CAN_CUT_STORE")


def plugins(kind: str) -> set[str]:
    return {path.parent.name for path in (ROOT / "plugins" / kind).glob("*/pyproject.toml")}


def chosen(section: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))


#: The kits against a real server of a broker.
BROKERED_KITS = [name for name in brokered_kit.__all__ if name.endswith(("Kit", "Checks"))]


@pytest.mark.parametrize(("section", "kind"), [("Transports", "transports"), ("Stores", "discovery")])
def test_the_page_has_exactly_one_row_for_every_plugin(section: str, kind: str) -> None:
    assert chosen(section) == plugins(kind)


def written_for(kind: str, name: str) -> str:
    return "\n".join(path.read_text() for path in (ROOT / "plugins" / kind / name / "tests").glob("test_*.py"))


@pytest.mark.parametrize("name", sorted(plugins("transports")))
def test_every_transport_is_held_to_the_kits(name: str) -> None:
    text = written_for("transports", name)
    if "(BrokeredTransportKit):" in text:
        assert [kit for kit in BROKERED_KITS if f"({kit}):" not in text] == []
        text += Path(brokered_kit.__file__ or "").read_text()

    assert "(TransportKit):" in text
    assert "(EventsKit):" in text
    # There is no way between caller and worker on which something could be lost in one process.
    powers = () if name == "inproc" else TRANSPORT_POWERS
    assert [power for power in powers if not re.search(rf"{power}\b.* = (True|\d)", text)] == []


@pytest.mark.parametrize("name", sorted(plugins("discovery")))
def test_every_store_is_held_to_the_kit(name: str) -> None:
    text = written_for("discovery", name)

    if "(StoreKit):" in text:
        text += Path(stores.__file__ or "").read_text()
    assert "(DiscoveryKit):" in text
    powers = () if name == "memory" else STORE_POWERS
    assert [power for power in powers if not re.search(rf"{power}\b.* = True", text)] == []
