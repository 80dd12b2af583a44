"""docs/migration.md names tests that exist for what the flag promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "migration.md").read_text().split("\n## How a break is seen, and what shows it\n")[1]
ROWS = re.findall(r"^\| (?!---|Promise)(.*?) \| (.*) \|$", TABLE, re.MULTILINE)
KIT = "".join(path.read_text() for path in (ROOT / "core/src/dynamo_core/testing/transport").glob("*.py"))
TESTS = {path.name: path for top in ("core", "plugins", "tests") for path in (ROOT / top).rglob("test_*.py")}


def test_every_promise_names_what_shows_it() -> None:
    name = r"`\w+(\.py)?::test_\w+`"

    assert len(ROWS) > 10
    assert [promise for promise, shown in ROWS if not re.fullmatch(rf"{name}(, {name})*", shown)] == []


@pytest.mark.parametrize("shown", sorted({name for _, names in ROWS for name in re.findall(r"`(\S+)`", names)}))
def test_the_test_is_there(shown: str) -> None:
    where, _, test = shown.partition("::")
    text = KIT if where == "TransportKit" else TESTS[where].read_text()

    assert re.search(rf"^ *(async )?def {test}\(", text, re.MULTILINE)
