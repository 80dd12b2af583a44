"""What the kits of all transports need."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other event loop of a class or module with a `QUICK_LOOP` to the long lanes."""
    for item in items:
        loop = getattr(getattr(item, "cls", None) or getattr(item, "module", None), "QUICK_LOOP", None)
        if loop is not None and {"asyncio": "uvloop", "uvloop": "asyncio"}[loop] in item.name:
            item.add_marker(pytest.mark.full)
