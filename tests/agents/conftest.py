"""Agents of other people at work. The lane `make test-agents` sets them up."""

from tests.clients.conftest import only_where_set_up, recorded
from tests.e2e.conftest import serve_for_module

__all__ = ["only_where_set_up", "recorded", "serve_for_module"]
