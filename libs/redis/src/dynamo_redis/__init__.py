"""What plugins over Redis or Valkey share: settings, connections and errors.

The names are loaded when first used: the settings do not need the Redis library, the rest does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_redis.connect import client_options, connection_factory
    from dynamo_redis.errors import Fault, RedisFailure, config_error, explain
    from dynamo_redis.settings import RedisSettings

_HOME = {
    "Fault": "errors",
    "RedisFailure": "errors",
    "RedisSettings": "settings",
    "client_options": "connect",
    "config_error": "errors",
    "connection_factory": "connect",
    "explain": "errors",
}

__all__ = [
    "Fault",
    "RedisFailure",
    "RedisSettings",
    "client_options",
    "config_error",
    "connection_factory",
    "explain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dynamo_redis.{_HOME[name]}"), name)
