"""docs/reference/metrics.md, row by row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Row:
    """What the page says of one metric. `labels` are all that it has, `pages` the processes that show it."""

    heading: str
    pages: frozenset[str]
    kind: str
    unit: str
    labels: frozenset[str]
    meaning: str


def rows() -> dict[str, Row]:
    """Return the rows of all groups by the name of the metric."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        facts = re.search(r"^On the page of (.*?); from .*?\.(?: All have the labels (.*)\.)?$", section, re.MULTILINE)
        for name, kind, unit, labels, meaning in re.findall(
            r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*) \|$", section, re.MULTILINE
        ):
            assert facts is not None, heading
            every = frozenset(re.findall(r"`(\w+)`", f"{labels}, {facts[2]}"))
            found[name] = Row(heading, frozenset(facts[1].split(" and ")), kind, unit, every, meaning)
    return found
