"""Links between the pages of the tree lead to files and headings that exist, and the map has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN = ("core", "runtime", "libs", "plugins", "tests", "docs", "examples", "deploy", "benchmarks")


def files(*suffixes: str) -> list[Path]:
    """Return the files of the tree with one of the suffixes, without environments and what others wrote."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for top in OWN for path in (ROOT / top).rglob("*") if path.is_file()]
    foreign = {"node_modules", ".pytest_cache"}
    return sorted(
        path
        for path in found
        if path.suffix in suffixes
        and not any(part in foreign or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
    )


PAGES = files(".md")


def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[str, str]]:
    """Return the paths and the anchors of the links that stay in the tree."""
    found = re.findall(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)", prose(page))
    return [(path, anchor) for path, anchor in found if ":" not in path]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)

    assert broken == []


def test_the_pages_that_texts_name_are_there() -> None:
    texts = [
        path.read_text(errors="replace")
        for path in files(".md", ".py", ".toml", ".yaml", ".yml", ".tmpl")
        if path.name != "CHANGELOG.md"
    ]
    named = {name for text in texts for name in re.findall(r"(?<![\w/.-])docs/[a-z/-]+\.(?:md|svg)", text)}

    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_map_has_every_page() -> None:
    shown = {(DOCS / path).resolve() for path, _ in links(DOCS / "README.md")}

    assert set(DOCS.rglob("*.md")) - shown == {DOCS / "README.md"}
