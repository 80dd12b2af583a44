"""What all plugin classes have in common."""

from __future__ import annotations

from typing import ClassVar, Final

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.resources import AsyncResource

#: The version of hooks and contracts in this release. A plugin module says which one it was made for.
DYNAMO_API = 2

#: The kinds of plugins: entry points are named ``<kind>-<name>`` in the group ``dynamo``.
KINDS = (
    "engine",
    "transport",
    "discovery",
    "router",
    "admission",
    "frontend",
    "extension",
    "tool_parser",
    "reasoning_parser",
    "hook",
)


#: The roles of a process in which an extension can run.
FRONTEND_ROLE: Final = "frontend"
WORKER_ROLE: Final = "worker"


class Plugin:
    """A class that can be picked by name in the config file.

    Subclasses set `NAME` (what ``use:`` says) and, if they have settings, a nested or assigned `Config`.
    """

    NAME: ClassVar[str] = ""
    Config: ClassVar[type[PluginConfig]] = PluginConfig


class ConnectingPlugin(Plugin, AsyncResource):
    """A plugin whose `start` may have to wait for a server."""

    #: Whether it reaches other processes.
    CROSS_PROCESS: ClassVar[bool] = True
    #: What `start` waits for now, in one line for operators; empty if for nothing. `/ready` shows it.
    waits_for: str = ""

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        self.config = config
        self.metrics = metrics

    async def start(self) -> None:
        """Connects to the server, or opens what all calls share. Called once before anything else.

        It reports with `wait_for` what it waits for. An error that waiting cannot mend is a `ConfigError`.
        """

    def wait_for(self, reason: str) -> None:
        """Sets what `start` waits for; empty when it no longer waits."""
        self.waits_for = reason
