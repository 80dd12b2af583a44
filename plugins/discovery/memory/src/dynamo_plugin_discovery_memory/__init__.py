"""Discovery within one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Discovery

DYNAMO_API = 1


@hookimpl
def dynamo_register_discovery() -> list[type[Discovery]]:
    from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery

    return [MemoryDiscovery]
