"""The API of Ollama, as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Frontend

DYNAMO_API = 1


@hookimpl
def dynamo_register_frontends() -> list[type[Frontend]]:
    """Return the frontend class; its modules are imported when it is asked for."""
    from dynamo_plugin_frontend_ollama.frontend import OllamaFrontend

    return [OllamaFrontend]
