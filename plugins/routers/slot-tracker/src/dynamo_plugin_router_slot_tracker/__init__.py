"""The slot tracker: accounting of active requests as a service, and a router that asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Router

DYNAMO_API = 1


@hookimpl
def dynamo_register_routers() -> list[type[Router]]:
    from dynamo_plugin_router_slot_tracker.router import SlotTrackerRouter

    return [SlotTrackerRouter]
