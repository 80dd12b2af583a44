"""The transport over Redis or Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Transport

DYNAMO_API = 1


@hookimpl
def dynamo_register_transports() -> list[type[Transport]]:
    from dynamo_plugin_transport_redis.transport import RedisTransport

    return [RedisTransport]
