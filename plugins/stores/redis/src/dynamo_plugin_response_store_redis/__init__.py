"""Responses kept in Redis, as a plugin: ``response_store: {use: redis}``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import ResponseStore

DYNAMO_API = 1


@hookimpl
def dynamo_register_response_stores() -> list[type[ResponseStore]]:
    """Return the store class; its module is imported when it is asked for."""
    from dynamo_plugin_response_store_redis.store import RedisStore

    return [RedisStore]
