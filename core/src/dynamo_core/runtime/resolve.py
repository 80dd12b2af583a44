"""From settings to plugins: loads every plugin the settings name and validates its own settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from dynamo_core.contracts.admission import Admission
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.frontend import Frontend
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.router import Router
from dynamo_core.contracts.transport import Transport
from dynamo_core.errors import ConfigError, PluginError
from dynamo_core.plugins.loader import LISTENER_KIND, PluginLoader
from dynamo_core.settings import LoadedSettings, Settings
from dynamo_core.settings.tree import DEFAULT

PluginT_co = TypeVar("PluginT_co", bound=Plugin, covariant=True)

#: The admission that lets every request in. It is built in: no plugin is loaded.
NO_ADMISSION = "none"


class Named(NamedTuple):
    """A plugin that the settings name: where, of which kind, and how it is called."""

    section: str
    kind: str
    name: str

    @property
    def key(self) -> str:
        """The key of the config file that holds the name."""
        return self.section if self.kind == LISTENER_KIND else f"{self.section}.use"


@dataclass(frozen=True, slots=True)
class Picked(Generic[PluginT_co]):
    """A plugin class with its validated settings. `section` is where the config file picks it."""

    cls: type[PluginT_co]
    config: PluginConfig
    name: str
    distribution: str
    version: str
    section: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every stage, as the settings pick it.

    `admission` is None if every request is let in; `events` is None if the transport's own event plane is used.
    `workers` holds the engine of each worker by the worker's name.
    """

    frontend: Picked[Frontend]
    router: Picked[Router]
    admission: Picked[Admission] | None
    transport: Picked[Transport]
    events: Picked[Transport] | None
    discovery: Picked[Discovery]
    workers: dict[str, Picked[LLMEngine]]


def named_plugins(settings: Settings) -> Iterator[Named]:
    """Every plugin that the settings name, in the order of a request's way, the listeners last."""
    yield Named("frontend", "frontend", settings.frontend.use)
    if settings.admission.use != NO_ADMISSION:
        yield Named("admission", "admission", settings.admission.use)
    yield Named("router", "router", settings.router.use)
    yield Named("transport", "transport", settings.transport.use)
    if settings.events.use is not None:
        yield Named("events", "transport", settings.events.use)
    yield Named("discovery", "discovery", settings.discovery.use)
    for name, worker in settings.workers.items():
        yield Named(f"workers.{name}.engine", "engine", worker.engine.use)
    for name in settings.hooks:
        yield Named("hooks", LISTENER_KIND, name)


def resolve(loaded: LoadedSettings, loader: PluginLoader) -> Resolved:
    """Loads all plugins that the settings name, the listeners too, and validates the settings of each.

    Nothing is constructed or started.

    Raises:
        PluginError: a plugin is missing or broken; the message begins with the place that asks for it.
        ConfigError: the settings of a plugin are wrong, or two picks do not go together.
    """
    picks: dict[str, Picked[Any]] = {}
    for named in named_plugins(loaded.settings):
        cls = load_plugin(named, loaded, loader)
        if cls is not None:
            offer = loader.find(named.kind, named.name)
            picks[named.section] = Picked(
                cls=cls,
                config=loaded.plugin_config(named.section, cls.Config),
                name=named.name,
                distribution=offer.distribution,
                version=offer.version,
                section=named.section,
            )
    for section in ("admission", "events"):
        if section not in picks:
            # Without a plugin there is none to know the keys that are left.
            loaded.plugin_config(section, PluginConfig)
    resolved = Resolved(
        frontend=picks["frontend"],
        router=picks["router"],
        admission=picks.get("admission"),
        transport=picks["transport"],
        events=picks.get("events"),
        discovery=picks["discovery"],
        workers={name: picks[f"workers.{name}.engine"] for name in loaded.settings.workers},
    )
    _check_reach(loaded, resolved)
    return resolved


def load_plugin(named: Named, loaded: LoadedSettings, loader: PluginLoader) -> type[Plugin] | None:
    """Loads one plugin that the settings name: its class, or None if it only listens.

    Raises:
        PluginError: it is missing or broken; the message begins with the place that asks for it.
    """
    try:
        if named.kind == LISTENER_KIND:
            loader.listen(named.name)
            return None
        return loader.load(named.kind, named.name)
    except PluginError as error:
        raise PluginError(f"{_place(loaded, named.key)}: {error}", cause=error) from error


def _place(loaded: LoadedSettings, key: str) -> str:
    origin = loaded.origin(key)
    return key if origin == DEFAULT else f"{origin}: {key}"


def _check_reach(loaded: LoadedSettings, resolved: Resolved) -> None:
    transport, discovery = resolved.transport, resolved.discovery
    if transport.cls.CROSS_PROCESS and not discovery.cls.CROSS_PROCESS:
        raise ConfigError(
            f"{_place(loaded, 'transport.use')}: {transport.name!r} carries calls between processes, but "
            f"discovery.use: {discovery.name!r} is seen by one process only: set discovery.use to one that all "
            "processes see, or transport.use to 'inproc'"
        )
