"""The Responses API, as a plugin; and the response store ``memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Frontend, ResponseStore

DYNAMO_API = 1


@hookimpl
def dynamo_register_frontends() -> list[type[Frontend]]:
    """Return the frontend class; its modules are imported when it is asked for."""
    from dynamo_plugin_frontend_responses.frontend import ResponsesFrontend

    return [ResponsesFrontend]


@hookimpl
def dynamo_register_response_stores() -> list[type[ResponseStore]]:
    """Return the store that needs nothing but memory."""
    from dynamo_plugin_frontend_responses.memory_store import MemoryStore

    return [MemoryStore]
