"""Real processes, as the end-to-end tests start them."""

from __future__ import annotations

from tests.e2e.conftest import serve

__all__ = ["serve"]
