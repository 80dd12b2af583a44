"""Discovery between processes on any number of hosts, in Redis or Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Discovery

DYNAMO_API = 1


@hookimpl
def dynamo_register_discovery() -> list[type[Discovery]]:
    from dynamo_plugin_discovery_redis.discovery import RedisDiscovery

    return [RedisDiscovery]
