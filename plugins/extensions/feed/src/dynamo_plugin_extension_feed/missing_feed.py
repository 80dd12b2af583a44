"""Messages of the commands when a frontend does not have the feed."""

from __future__ import annotations

from typing import Any, Final

from dynamo_core.errors import ConfigError
from dynamo_http import AdminClient, reason_of

#: How a frontend begins its answer for a path that it does not serve.
_NO_ROUTE: Final = "Route not found"


def is_unserved(status: int, answer: Any) -> bool:
    """Return whether the frontend, or this listener of it, has no such route."""
    return status == 404 and reason_of(answer).startswith(_NO_ROUTE)


def feed_error(client: AdminClient, status: int, answer: Any) -> ConfigError:
    """Return why the frontend does not answer, and what may mend it."""
    hint = ""
    if is_unserved(status, answer):
        hint = (
            ": the frontend does not run the extension feed, or this is not its admin listener: with admin.port, give "
            "that address with --url or DYN_ADMIN_URL"
        )
    return ConfigError(f"{client.name}: {reason_of(answer)} ({status}){hint}")
