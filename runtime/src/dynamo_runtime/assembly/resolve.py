"""Resolution of settings to plugins: load every named plugin and validate its own settings."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from dynamo_core.certificates import server_context
from dynamo_core.contracts.admission import Admission
from dynamo_core.contracts.config import NESTED, PluginConfig, PluginRef
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.engine import AUTO_PARSER, LLMEngine
from dynamo_core.contracts.extension import Extension
from dynamo_core.contracts.frontend import Frontend
from dynamo_core.contracts.model_folder import TOKENIZER
from dynamo_core.contracts.parsers import Parsers, ReasoningParser, ToolCallParser
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.response_store import ResponseStore
from dynamo_core.contracts.router import Router
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import ConfigError, PluginError
from dynamo_core.plugins.loader import (
    LISTENER_KIND,
    PARSER_KINDS,
    REASONING_PARSER,
    TOOL_PARSER,
    PluginLoader,
)
from dynamo_core.protocol.records import ModelCard
from dynamo_http.auth import AdminToken, ApiKeys

from dynamo_runtime.assembly.api_set import api_set, apis_of, check_once
from dynamo_runtime.settings import AdmissionSection, LoadedSettings, Settings
from dynamo_runtime.settings.tree import Leaf, find, location
from dynamo_runtime.worker.parser_choice import model_text

#: The kind of plugins that are APIs for clients.
FRONTEND_KIND: Final = "frontend"
#: The section of the response store.
RESPONSE_STORE: Final = "frontend.response_store"

PluginT_co = TypeVar("PluginT_co", bound=Plugin, covariant=True)


class NamedPlugin(NamedTuple):
    """A plugin that the settings name: its place, kind and name."""

    section: str
    kind: str
    name: str

    @property
    def key(self) -> str:
        """The key of the config file that holds the name."""
        return self.section if self.kind in (LISTENER_KIND, *PARSER_KINDS) else f"{self.section}.use"


@dataclass(frozen=True, slots=True)
class PickedPlugin(Generic[PluginT_co]):
    """A plugin class with its validated settings. `section` is where the config file picks it.

    `inner` is the plugin that it wraps, if any.
    """

    cls: type[PluginT_co]
    config: PluginConfig
    name: str
    distribution: str
    version: str
    section: str
    inner: PickedPlugin[PluginT_co] | None = None

    def chain(self) -> Iterator[PickedPlugin[PluginT_co]]:
        """Yield the plugin and those that it wraps, from the outside in."""
        picked: PickedPlugin[PluginT_co] | None = self
        while picked is not None:
            yield picked
            picked = picked.inner


class PickedExtension(NamedTuple):
    """An extension of this process: its name in the config, its role, and its plugin."""

    name: str
    role: str
    plugin: PickedPlugin[Extension]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every stage, as the settings pick it.

    `admission` holds the plugins that are asked in turn; none lets every request in. `events` is None if the
    transport's own event plane is used; `frontend` and `router` are None in a process that only runs workers.
    `workers` holds the engine of each worker by the worker's name; `extensions` are those of this process.
    """

    frontend: PickedPlugin[Frontend] | None
    router: PickedPlugin[Router] | None
    admission: tuple[PickedPlugin[Admission], ...]
    transport: PickedPlugin[Transport]
    events: PickedPlugin[Transport] | None
    discovery: PickedPlugin[Discovery]
    workers: dict[str, PickedPlugin[LLMEngine]]
    extensions: Sequence[PickedExtension] = ()
    #: None where nothing is kept between requests.
    response_store: PickedPlugin[ResponseStore] | None = None

    def __iter__(self) -> Iterator[PickedPlugin[Any]]:
        """Yield every plugin that is picked."""
        routers = () if self.router is None else self.router.chain()
        single = (
            self.frontend,
            self.response_store,
            *self.admission,
            *routers,
            self.transport,
            self.events,
            self.discovery,
        )
        yield from (picked for picked in single if picked is not None)
        yield from (extension.plugin for extension in self.extensions)
        yield from self.workers.values()


def named_plugins(settings: Settings) -> Iterator[NamedPlugin]:
    """Yield every plugin that the settings name, in the order of a request's way, the listeners last."""
    yield NamedPlugin("frontend", FRONTEND_KIND, settings.frontend.use)
    if settings.frontend.response_store.use is not None:
        yield NamedPlugin(RESPONSE_STORE, "response_store", settings.frontend.response_store.use)
    for path, section in settings.admissions.items():
        yield NamedPlugin(path, "admission", section.use)
    yield from _chain(NamedPlugin("router", "router", settings.router.use), settings.router.options)
    yield NamedPlugin("transport", "transport", settings.transport.use)
    if settings.events.use is not None:
        yield NamedPlugin("events", "transport", settings.events.use)
    yield NamedPlugin("discovery", "discovery", settings.discovery.use)
    for path, entry in settings.extension_entries.items():
        yield NamedPlugin(path, "extension", entry.use)
    for name, worker in settings.workers.items():
        yield NamedPlugin(f"workers.{name}.engine", "engine", worker.engine.use)
        model = worker.model
        if model.tool_call_parser not in (None, AUTO_PARSER):
            yield NamedPlugin(f"workers.{name}.model.tool_call_parser", TOOL_PARSER, model.tool_call_parser)
        if model.reasoning_parser not in (None, AUTO_PARSER):
            yield NamedPlugin(f"workers.{name}.model.reasoning_parser", REASONING_PARSER, model.reasoning_parser)
    for name in settings.hooks:
        yield NamedPlugin("hooks", LISTENER_KIND, name)


def _chain(named: NamedPlugin, options: Mapping[str, Any]) -> Iterator[NamedPlugin]:
    """Yield the plugin of a section and those that it wraps, from the outside in."""
    yield named
    below = options.get(NESTED)
    if isinstance(below, Mapping) and isinstance(below.get("use"), str):
        yield from _chain(NamedPlugin(f"{named.section}.{NESTED}", named.kind, below["use"]), below)


def resolve(
    loaded: LoadedSettings, loader: PluginLoader, *, frontend: bool = True, workers: Collection[str] | None = None
) -> Resolved:
    """Load the plugins that the settings name, the listeners too, and validate the settings of each.

    A process that is only a frontend, or only some workers (by default it is all of them), loads only what it runs: the
    engines need not be installed where the frontend is. Nothing is constructed or started.

    Raises:
        PluginError: a plugin is missing or broken; the message begins with the location that asks for it.
        ConfigError: the settings of a plugin are wrong, two picks do not go together, a model's folder is not there, or
            nothing could be served.
    """
    picks: dict[str, PickedPlugin[Any]] = {}
    names = tuple(loaded.settings.workers if workers is None else workers)
    needed = {f"workers.{name}.engine" for name in names} | {"transport", "events", "discovery", "hooks"}
    if frontend:
        needed |= {"frontend", RESPONSE_STORE, "router", *loaded.settings.admissions}
    entries = loaded.settings.extension_entries
    roles = {path: entry.role_in(frontend=frontend, worker=bool(names)) for path, entry in entries.items()}
    needed |= {path for path, role in roles.items() if role is not None}
    for named in named_plugins(loaded.settings):
        # Answers are parsed where the frontend is.
        if not (frontend if named.kind in PARSER_KINDS else named.section in needed):
            continue
        cls = load_plugin(named, loaded, loader)
        if cls is not None and named.kind not in PARSER_KINDS:
            picks[named.section] = _pick(named, cls, loaded, loader)
    admissions = tuple(loaded.settings.admissions) if frontend else ()
    unused = [
        "events",
        *([RESPONSE_STORE] if frontend else []),
        *(["admission"] if frontend and isinstance(loaded.settings.admission, AdmissionSection) else []),
    ]
    for section in unused:
        if section not in picks:
            # Without a plugin there is none to know the keys that are left.
            loaded.plugin_config(section, PluginConfig)
    resolved = Resolved(
        frontend=picks.get("frontend"),
        router=picks.get("router"),
        admission=tuple(picks[section] for section in admissions),
        transport=picks["transport"],
        events=picks.get("events"),
        discovery=picks["discovery"],
        workers={name: picks[f"workers.{name}.engine"] for name in names},
        extensions=[PickedExtension(entries[path].key, role, picks[path]) for path, role in roles.items() if role],
        response_store=picks.get(RESPONSE_STORE),
    )
    _check_extensions(loaded, resolved)
    _check_reach(loaded, resolved)
    _check_workers(loaded, resolved)
    if frontend:
        _check_routes(resolved)
        _check_listeners(loaded)
        check_access(loaded)
    return resolved


def _pick(named: NamedPlugin, cls: type[Plugin], loaded: LoadedSettings, loader: PluginLoader) -> PickedPlugin[Any]:
    """Return the plugin with its settings, and the one that it wraps."""
    try:
        config = loaded.plugin_config(named.section, cls.Config)
    except ConfigError as error:
        if named.kind == FRONTEND_KIND and (reason := _unserved_key(cls, loaded, loader)):
            raise ConfigError(reason) from error
        raise
    offer = loader.find(named.kind, named.name)
    ref, inner = getattr(config, NESTED, None), None
    if isinstance(ref, PluginRef):
        below = NamedPlugin(f"{named.section}.{NESTED}", named.kind, ref.use)
        wrapped = load_plugin(below, loaded, loader)
        assert wrapped is not None  # noqa: S101 - only routers wrap others, and they have classes
        inner = _pick(below, wrapped, loaded, loader)
    return PickedPlugin(cls, config, named.name, offer.distribution, offer.version, named.section, inner)


def load_plugin(named: NamedPlugin, loaded: LoadedSettings, loader: PluginLoader) -> type[Plugin] | None:
    """Load one plugin that the settings name: its class, or None if it only listens.

    Raises:
        PluginError: it is missing or broken; the message begins with the location that asks for it.
    """
    try:
        if named.kind == LISTENER_KIND:
            loader.listen(named.name)
            return None
        if named.kind == FRONTEND_KIND:
            return api_set(_apis(named, loaded, loader))
        return loader.load(named.kind, named.name)
    except PluginError as error:
        raise PluginError(f"{_place(loaded, named.key)}: {error}", cause=error) from error


def _apis(named: NamedPlugin, loaded: LoadedSettings, loader: PluginLoader) -> dict[str, type[Frontend]]:
    """Load the APIs that the settings list, else the one that they pick and those that belong to it."""
    listed = loaded.settings.frontend.apis
    if listed is not None:
        return {name: _listed_api(name, loaded, loader) for name in listed}
    picked = cast("type[Frontend]", loader.load(FRONTEND_KIND, named.name))
    installed = {entry.name for entry in loader.entries if entry.kind == FRONTEND_KIND}
    others = [name for name in picked.COMPANIONS if name in installed]
    return {
        named.name: picked,
        **{name: cast("type[Frontend]", loader.load(FRONTEND_KIND, name)) for name in others},
    }


def _unserved_key(cls: type[Plugin], loaded: LoadedSettings, loader: PluginLoader) -> str:
    """Return what to do about a key of an installed API that is not served; empty if there is none."""
    unknown = loaded.settings.frontend.options.keys() - cls.Config.model_fields
    frontend = cast("type[Frontend]", cls)
    served = list(apis_of(frontend)) or [frontend.NAME]
    for name in sorted({entry.name for entry in loader.entries if entry.kind == FRONTEND_KIND} - {*served}):
        with suppress(PluginError):
            for key in sorted(unknown & loader.load(FRONTEND_KIND, name).Config.model_fields.keys()):
                listed = ", ".join(f"{{use: {api}}}" for api in (*served, name))
                return (
                    f"{_place(loaded, f'frontend.{key}')}: is a key of the API {name!r}, which is not served: "
                    f"write frontend: [{listed}], or leave it out"
                )
    return ""


def _listed_api(name: str, loaded: LoadedSettings, loader: PluginLoader) -> type[Frontend]:
    try:
        return cast("type[Frontend]", loader.load(FRONTEND_KIND, name))
    except PluginError as error:
        raise ConfigError(f"{_place_of_api(name, loaded)}: {error}", cause=error) from error


def _place_of_api(name: str, loaded: LoadedSettings) -> str:
    """Return the place of the entry that lists an API."""
    key = "frontend.apis"
    listed = find(loaded.tree, key.split("."))
    for index, entry in enumerate(listed.items if isinstance(listed, Leaf) else ()):
        if isinstance(entry, Leaf) and entry.value == name:
            return location(entry.origin, f"frontend[{index}].use")
    return _place(loaded, key)


def _place(loaded: LoadedSettings, key: str) -> str:
    return location(loaded.origin(key), key)


def store_remark(resolved: Resolved, processes: int) -> str:
    """Return what operators should know of a response store that is unused or not shared; empty if all is well."""
    store = resolved.response_store
    if store is not None and resolved.frontend is not None and not resolved.frontend.cls.USES_RESPONSE_STORE:
        return f"no API that is served uses the response store {store.name!r}: add {{use: responses}} to frontend"
    if store is None or store.cls.CROSS_PROCESS or processes == 1:
        return ""
    return (
        f"each of the {processes} frontend processes has a response store {store.name!r} of its own, so that only the "
        "process that has stored a response finds it: use a store that they share, such as 'sqlite'"
    )


def _check_extensions(loaded: LoadedSettings, resolved: Resolved) -> None:
    there = {extension.plugin.name for extension in resolved.extensions}
    for name, role, picked in resolved.extensions:
        if role not in picked.cls.ROLES:
            key = f"{picked.section}.role"
            raise ConfigError(
                f"{_place(loaded, key)}: extension {picked.name!r} cannot run in the role {role!r}: set {key} to "
                f"{' or '.join(repr(one) for one in picked.cls.ROLES)}, or leave {name!r} out"
            )
        place = _place(loaded, picked.section)
        for missing in (need for need in picked.cls.NEEDS if need not in there):
            raise ConfigError(
                f"{place}: extension {picked.name!r} needs the extension {missing!r}, which does not run: add "
                f"{{use: {missing}}} to extensions, or leave {name!r} out"
            )
        if picked.cls.NEEDS_ADMIN_PORT and loaded.settings.admin.port is None:
            raise ConfigError(
                f"{place}: extension {picked.name!r} is for operators only, and all clients reach the only listener: "
                f"set admin.port, such as 9090, or leave {name!r} out"
            )


def _check_routes(resolved: Resolved) -> None:
    """Check the routes that the settings tell. Those that only a frontend knows are checked when it is made."""
    picked = resolved.frontend
    if picked is not None:
        check_once((picked.cls.NAME, claim) for claim in picked.cls.claims(picked.config))


def _check_reach(loaded: LoadedSettings, resolved: Resolved) -> None:
    transport, discovery = resolved.transport, resolved.discovery
    if transport.cls.CROSS_PROCESS and not discovery.cls.CROSS_PROCESS:
        raise ConfigError(
            f"{_place(loaded, 'transport.use')}: {transport.name!r} carries calls between processes, but "
            f"discovery.use: {discovery.name!r} is seen by one process only: set discovery.use to one that all "
            "processes see, or transport.use to 'inproc'"
        )
    processes = loaded.settings.frontend.processes
    if processes > 1 and not transport.cls.CROSS_PROCESS:
        raise ConfigError(
            f"{_place(loaded, 'frontend.processes')}: {processes} processes cannot share what transport.use: "
            f"{transport.name!r} keeps in one: set transport.use to one that reaches other processes, such as 'tcp', "
            "or frontend.processes to 1"
        )


def _check_workers(loaded: LoadedSettings, resolved: Resolved) -> None:
    discovery = resolved.discovery
    if not loaded.settings.workers and not discovery.cls.CROSS_PROCESS:
        raise ConfigError(
            f"{_place(loaded, 'workers')}: none is configured, and discovery.use: {discovery.name!r} sees those of "
            "this process only, so nothing could be served: add one, such as "
            "workers: {mock: {model: {name: mock-model}, engine: {use: mocker}}}"
        )
    for name in resolved.workers:
        worker = loaded.settings.workers[name]
        if worker.model.path is not None:
            fault = _folder_fault(Path(worker.model.path))
            if fault is not None:
                raise ConfigError(
                    f"{_place(loaded, f'workers.{name}.model.path')}: {worker.model.path} {fault}; set it to a folder "
                    f"that holds {TOKENIZER}, or leave it out if the engine needs no model "
                    "files: bytes are the tokens then"
                )


def _folder_fault(folder: Path) -> str | None:
    """Return what is wrong with a model folder, as far as a look from outside tells."""
    try:
        if not folder.is_dir():
            return "is not a folder" if folder.exists() else "does not exist"
        return None if (folder / TOKENIZER).exists() else f"has no {TOKENIZER}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _check_listeners(loaded: LoadedSettings) -> None:
    frontend, admin = loaded.settings.frontend, loaded.settings.admin
    # Each frontend process has an admin port of its own, counted up from this one.
    if admin.port and 0 <= frontend.port - admin.port < frontend.processes and _meet(frontend.host, admin.host):
        raise ConfigError(
            f"{_place(loaded, 'admin.port')}: {frontend.port} is the port of the frontend too: choose another, or "
            "leave admin.port out to serve its routes on the public listener"
        )


def check_access(loaded: LoadedSettings) -> None:
    """Look at certificates and keys, so that what is wrong with them is told before anything uses them.

    Raises:
        ConfigError: a file or a key cannot be used, or nothing uses it; the message begins with its location.
    """
    settings = loaded.settings
    with _placed(loaded):
        server_context(settings.frontend.tls, "frontend.tls")
        server_context(settings.admin.tls, "admin.tls")
        keys = ApiKeys.load(settings.auth, os.environ)
        if settings.admin.token is not None:
            AdminToken(settings.admin.token)
    if keys is not None and settings.admin.port is None and settings.admin.token is None:
        raise ConfigError(
            f"{_place(loaded, 'auth.keys')}: keys guard the models, but /metrics and the operators' routes are on the "
            "same listener, open to all: set admin.port to give them their own, or admin.token"
        )
    if settings.admin.tls.cert is not None and settings.admin.port is None:
        raise ConfigError(
            f"{_place(loaded, 'admin.tls.cert')}: there is no admin listener to use it: set admin.port, or leave it out"
        )


@contextmanager
def _placed(loaded: LoadedSettings) -> Iterator[None]:
    """Put the origin of a key in front of errors that begin with the key."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        key = re.split(r"[^\w.]", text, maxsplit=1)[0]
        raise ConfigError(f"{_place(loaded, key)}{text.removeprefix(key)}") from error


def _meet(one: str, other: str) -> bool:
    """Return whether two addresses to listen on share one. Names other than ``localhost`` are not looked up."""
    hosts = {"127.0.0.1" if host == "localhost" else host.strip("[]") for host in (one, other)}
    return len(hosts) == 1 or ("0.0.0.0" in hosts and not any(":" in host for host in hosts))


async def load_parsers(loader: PluginLoader, card: ModelCard, files: Mapping[str, bytes]) -> Parsers:
    """Load the parsers that a card names, for the model that has these files.

    Raises:
        PluginError: one is not installed or is broken.
        ValueError: one cannot follow what the files say of the model's format.
    """
    tools, reasoning = card.runtime_config.tool_call_parser, card.runtime_config.reasoning_parser
    parsers = Parsers(
        None if tools is None else cast("type[ToolCallParser]", loader.load(TOOL_PARSER, tools)),
        None if reasoning is None else cast("type[ReasoningParser]", loader.load(REASONING_PARSER, reasoning)),
    )
    if any(parser is not None and parser.DESCRIBED for parser in (parsers.tools, parsers.reasoning)):
        # The files may be large.
        return await asyncio.to_thread(_parsers_for, parsers, files)
    return parsers


def _parsers_for(parsers: Parsers, files: Mapping[str, bytes]) -> Parsers:
    model = model_text(files)
    return Parsers(
        None if parsers.tools is None else parsers.tools.for_model(model),
        None if parsers.reasoning is None else parsers.reasoning.for_model(model),
    )
