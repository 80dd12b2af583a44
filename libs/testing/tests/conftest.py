"""How long the checks of the kits wait for broken parts."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the patience where a failure is expected, so that the other checks can have plenty on a busy machine."""
    part = request.cls
    if hasattr(part, "PATIENCE"):
        hurried, patient = part.PATIENCE
        monkeypatch.setattr(part, "WAIT", hurried if request.node.originalname in part.FAILS else patient)
