"""The router that prefers workers whose KV caches hold the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

from dynamo_plugin_router_kv.listeners import finished

if TYPE_CHECKING:
    from dynamo_core import Router
    from dynamo_core.protocol import RequestRecord

DYNAMO_API = 1


@hookimpl
def dynamo_register_routers() -> list[type[Router]]:
    from dynamo_plugin_router_kv.router import KvRouter

    return [KvRouter]


@hookimpl
def dynamo_request_finished(record: RequestRecord) -> None:
    finished(record)
