"""Load-aware routers: random, the better of two, the least loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Router

DYNAMO_API = 1


@hookimpl
def dynamo_register_routers() -> list[type[Router]]:
    from dynamo_plugin_router_load_aware.routers import LeastLoadedRouter, PowerOfTwoRouter, RandomRouter

    return [RandomRouter, PowerOfTwoRouter, LeastLoadedRouter]
