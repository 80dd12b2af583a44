"""docs/how-to/request-rejection.md links to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "request-rejection.md").read_text()


def test_the_files_that_the_page_links_to_are_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)

    assert [link for link in links if not (ROOT / "docs" / "how-to" / link).exists()] == []
    assert "../../examples/overload/client.py" in links
