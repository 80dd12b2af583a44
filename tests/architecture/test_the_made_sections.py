"""The sections of the pages that are made from the code are as the code has them now."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from scripts.pages import COMMAND, ROOT, SECTIONS, filled, pages
from scripts.pages.tables import field_rows


class Shown:
    """A class whose fields a page shows."""

    #: How many jobs run, and
    #: how many wait.
    running: int = 0
    waiting: int = 0
    #: The name of the ``queue``.
    name = "first"

    def close(self) -> None:
        """Close the queue."""
        hidden = 1
        assert hidden


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


def test_fields_share_the_comment_above_them() -> None:
    assert list(field_rows(Shown)) == [
        ("`running`, `waiting`", "How many jobs run, and how many wait."),
        ("`name`", "The name of the `queue`."),
    ]
