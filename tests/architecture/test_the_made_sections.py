"""The sections of the pages that are made from the code are as the code has them now."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from scripts.pages import COMMAND, ROOT, SECTIONS, filled, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_made_sections_are_equal_to_the_code(page: Path) -> None:
    written = page.read_text()

    lines = difflib.unified_diff(
        written.splitlines(), filled(written).splitlines(), "written", "made", lineterm="", n=0
    )
    if difference := "\n".join(lines):
        pytest.fail(f"run `{COMMAND}`:\n{difference}")


def test_every_section_is_on_one_page() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))

    assert {name: text.count(f"<!-- made: {name} -->") for name in SECTIONS} == dict.fromkeys(SECTIONS, 1)
    assert text.count("<!-- made: ") == len(SECTIONS)
