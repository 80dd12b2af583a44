"""Makes the sections of the pages below docs that the code knows: ``python -m scripts.pages``.

A page marks such a section with a pair of comments, which the command fills:

    <!-- made: NAME -->
    …
    <!-- end: NAME -->

`SECTIONS` has the function that makes the text of each name. Everything outside of the comments is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.pages import api, commands, configuration, contracts, engine, kits, metrics, tree

ROOT = Path(__file__).parents[2]
COMMAND = "python -m scripts.pages"

#: How the text of a section is made, by the section's name.
SECTIONS: Mapping[str, Callable[[], str]] = {
    **api.SECTIONS,
    **commands.SECTIONS,
    **configuration.SECTIONS,
    **contracts.SECTIONS,
    **engine.SECTIONS,
    **kits.SECTIONS,
    **tree.SECTIONS,
    "metrics": metrics.made,
}

_MADE = re.compile(r"^<!-- made: (\S+) -->\n(.*?)^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the pages with a section that is made."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if _MADE.search(page.read_text())]


def filled(text: str) -> str:
    """Return the text of a page with its sections as the code has them now.

    Raises:
        KeyError: A page marks a section that `SECTIONS` does not have.
    """
    return _MADE.sub(
        lambda found: f"<!-- made: {found[1]} -->\n{SECTIONS[found[1]]().strip()}\n<!-- end: {found[1]} -->", text
    )
