"""The base of every process, whatever its role: plugins, metrics, transport, event plane, discovery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.plugin import ConnectingPlugin
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.plugins.loader import PluginLoader
from dynamo_core.resources import ClosingStack
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.assembly.reload import Plan, Step, switch
from dynamo_runtime.assembly.resolve import Resolved, resolve
from dynamo_runtime.settings import LoadedSettings
from dynamo_runtime.telemetry.access_log import AccessLog


class ProcessServices:
    """Loads the plugins that a role needs and makes the planes; nothing is started yet.

    Raises:
        ConfigError: the settings or a plugin are wrong.
    """

    def __init__(self, loaded: LoadedSettings, role: Role) -> None:
        self._shown = loaded
        self.settings = loaded.settings
        self.loader = PluginLoader(loaded.plugin_files)
        self.loader.register_builtin(AccessLog(), "access-log")
        self.resolved: Resolved = resolve(loaded, self.loader, frontend=role.frontend, workers=_picked(role))
        self.metrics = Metrics()
        picked = self.resolved.transport
        self.transport: Transport = picked.cls(picked.config, self.metrics)
        other = self.resolved.events
        self._events: Transport = self.transport if other is None else other.cls(other.config, self.metrics)
        found = self.resolved.discovery
        self.discovery: Discovery = found.cls(found.config, self.metrics)
        self._starting: tuple[str, ConnectingPlugin] | None = ("transport", self.transport)

    @property
    def events(self) -> EventPlane:
        """The event plane: the transport's own, or the one that ``events.use`` names."""
        return self._events.events()

    def announce(self, hook: str, **arguments: object) -> None:
        """Tell the listeners of a hook."""
        self.loader.hooks.announce(hook, **arguments)

    @property
    def waits_for(self) -> str:
        """The service that `start` has yet to reach, with the reason; empty once all is connected. For any thread."""
        if self._starting is None:
            return ""
        section, plugin = self._starting
        return f"waiting for {section} {plugin.NAME}" + (f": {plugin.waits_for}" if plugin.waits_for else "")

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """See `dynamo_runtime.assembly.reload.Reloadable`."""
        yield switch("settings", self._show, plan.before, plan.loaded)
        yield from plan.reconfigured("transport", [self.transport])
        yield from plan.reconfigured("events", [self._events])
        yield from plan.reconfigured("discovery", [self.discovery])

    def rows(self) -> Sequence[tuple[str, Any, str]]:
        """Return the settings in force; see `dynamo_core.contracts.extension.SettingsReport`."""
        return self._shown.rows()

    def _show(self, loaded: LoadedSettings) -> None:
        self._shown = loaded

    async def start(self, stack: ClosingStack) -> None:
        """Connect to whatever the planes need; `stack` closes them."""
        await stack.enter(self.transport).start()
        if self._events is not self.transport:
            self._starting = ("events", self._events)
            await stack.enter(self._events).start()
        self._starting = ("discovery", self.discovery)
        await stack.enter(self.discovery).start()
        self._starting = None


def _picked(role: Role) -> tuple[str, ...]:
    """Return the workers whose engines are plugins."""
    return () if role.hosted is not None else role.workers
