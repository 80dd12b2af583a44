"""Makes the tables of docs/reference/metrics.md from the metrics that the code declares."""

from __future__ import annotations

from pathlib import Path

from scripts.pages.metrics.declarations import recorded, sources, unreached
from scripts.pages.metrics.page import Undocumented, text

ROOT = Path(__file__).parents[3]


def made() -> str:
    """Return the tables as the code has them now.

    Raises:
        Undocumented: A metric cannot be documented; says why, and what to do.
    """
    declarations = recorded()
    if missed := unreached(sources(ROOT), declarations):
        places = ", ".join(f"{path.relative_to(ROOT)}:{line}" for path, line in missed)
        raise Undocumented(
            f"{places} declare metrics, and no deployment of scripts/pages/metrics/declarations.py goes there"
        )
    return text(declarations)
