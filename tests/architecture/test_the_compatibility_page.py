"""tests/promises/openai-compatibility.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "promises" / "openai-compatibility.md").read_text()
ROWS = re.findall(r"^\| (?!---|Promise|Name)(.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)


def test_every_promise_names_what_shows_it() -> None:
    assert len(ROWS) > 50
    assert [promise for promise, _, shown in ROWS if not re.fullmatch(r"`[\w/]+\.py::test_\w+`", shown)] == []


@pytest.mark.parametrize("shown", sorted({shown.strip("`") for _, _, shown in ROWS}))
def test_the_test_is_there(shown: str) -> None:
    name, _, test = shown.partition("::")
    path = ROOT / name if "/" in name else ROOT / "plugins" / "frontends" / "openai" / "tests" / name

    assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE)
