"""The base of all plugin classes."""

from __future__ import annotations

from typing import ClassVar, Final

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import NotSupported
from dynamo_core.resources import AsyncResource

#: The version of hooks and contracts in this release. A plugin module says which one it was made for.
DYNAMO_API = 1

#: The kinds of plugins: entry points are named ``<kind>-<name>`` in the group ``dynamo``.
KINDS = (
    "engine",
    "transport",
    "discovery",
    "router",
    "admission",
    "frontend",
    "response_store",
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

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A Config of another sort is refused by the loader, which names the distribution.
        if getattr(cls.Config, "LIVE", ()) and cls.reconfigure is Plugin.reconfigure:
            raise TypeError(f"{cls.__name__} has no reconfigure, but {cls.Config.__name__}.LIVE names fields")

    async def reconfigure(self, config: PluginConfig) -> None:
        """Take settings that differ from the present ones in fields of `Config.LIVE` only: all of them, or none.

        Called on each object of the class, started or not, while requests run; those go on. It raises if it cannot take
        them; then it may be called with the former settings too.
        """
        raise NotSupported(f"{type(self).__name__} takes no settings while it runs")


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
        """Connect to the server, or open what all calls share. Called once before anything else.

        It reports with `wait_for` what it waits for. An error that waiting cannot mend is a `ConfigError`.
        """

    def wait_for(self, reason: str) -> None:
        """Set what `start` waits for; empty when it no longer waits."""
        self.waits_for = reason
