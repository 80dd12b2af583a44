"""The extension with the operators' web page: the state of all frontends and workers, and controls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Extension

DYNAMO_API = 1


@hookimpl
def dynamo_register_extensions() -> list[type[Extension]]:
    from dynamo_plugin_extension_dashboard.dashboard import DashboardExtension

    return [DashboardExtension]
