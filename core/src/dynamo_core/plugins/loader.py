"""The plugin loader: import the plugins that the config names, and nothing else."""

from __future__ import annotations

import difflib
import inspect
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from dynamo_core.contracts.admission import NO_ADMISSION
from dynamo_core.contracts.config import NESTED, PluginConfig, PluginRef
from dynamo_core.contracts.plugin import DYNAMO_API, KINDS, Plugin
from dynamo_core.errors import ConfigError, PluginError
from dynamo_core.plugin_files import NO_FILES, FileName, PluginFiles, read_trusted
from dynamo_core.plugins.hooks import HookError, Hooks
from dynamo_core.plugins.metadata import BY_NAME, PluginEntry, declared_kinds, find_plugins, only_one

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

#: The kind of plugins that offer no class and only listen.
LISTENER_KIND = "hook"

#: The kinds of parsers. One distribution of ours holds them all.
TOOL_PARSER, REASONING_PARSER = "tool_parser", "reasoning_parser"
PARSER_KINDS = (TOOL_PARSER, REASONING_PARSER)


@dataclass(frozen=True, slots=True)
class Contract:
    """The contract of a kind of plugin, and the hook that offers it. The class is named, as not all are needed."""

    hook: str
    module: str
    class_name: str
    package: str = "dynamo_core.contracts."
    #: The entry points of a kind that distributions add.
    declared: tuple[EntryPoint, ...] = ()

    @classmethod
    def of_kind(cls, kind: str, entries: Sequence[EntryPoint]) -> Contract:
        """Return the contract of a kind that a distribution adds."""
        first = entries[0]
        return cls(f"dynamo_register_{kind}s", first.module, first.attr, package="", declared=tuple(entries))

    def load(self) -> type[Plugin]:
        """Return the abstract class.

        Raises:
            PluginError: the distribution that adds the kind does not have it, or several add it.
        """
        if self.declared:
            only_one(self.declared)
        try:
            contract: type[Plugin] = getattr(import_module(f"{self.package}{self.module}"), self.class_name)
        except Exception as error:
            where = f"{self.module}:{self.class_name}"
            raise PluginError(f"contract {where} cannot be imported: {_cause(error)}", cause=error) from error
        return contract


CONTRACTS = {
    "engine": Contract("dynamo_register_engines", "engine", "LLMEngine"),
    "transport": Contract("dynamo_register_transports", "transports.transport", "Transport"),
    "discovery": Contract("dynamo_register_discovery", "discovery", "Discovery"),
    "router": Contract("dynamo_register_routers", "router", "Router"),
    "admission": Contract("dynamo_register_admission", "admission", "Admission"),
    "frontend": Contract("dynamo_register_frontends", "frontend", "Frontend"),
    "response_store": Contract("dynamo_register_response_stores", "response_store", "ResponseStore"),
    "extension": Contract("dynamo_register_extensions", "extension", "Extension"),
    TOOL_PARSER: Contract("dynamo_register_tool_parsers", "parsers", "ToolCallParser"),
    REASONING_PARSER: Contract("dynamo_register_reasoning_parsers", "parsers", "ReasoningParser"),
}


#: Our distributions that are not called after their plugins, by kind and name.
_OURS = {
    **{(kind, ""): "ours is dynamo-plugin-parsers-standard" for kind in PARSER_KINDS},
    ("response_store", "memory"): "ours is dynamo-plugin-frontend-responses",
}


class PluginLoader:
    """A loader that finds installed plugins, loads them by kind and name, and holds their hooks.

    The application makes one and hands it down. Making it reads metadata; it imports no plugin. `files` are the plugins
    of one file that may be loaded: those that the config file of this process names.
    """

    def __init__(self, files: PluginFiles = NO_FILES) -> None:
        #: The listeners. Announce with ``loader.hooks.announce("dynamo_…", …)``.
        self.hooks = Hooks()
        self._contracts = dict(CONTRACTS)
        for kind, entries in declared_kinds().items():
            self._contracts[kind] = contract = Contract.of_kind(kind, entries)
            self.hooks.offer(contract.hook)
        self._files = files
        self._entries = find_plugins()
        self._modules: dict[str, ModuleType] = {}
        self._classes: dict[tuple[str, str], dict[str, type[Plugin]]] = {}
        self._loaded: set[PluginEntry] = set()

    @property
    def entries(self) -> list[PluginEntry]:
        """All that is installed, by kind and name, and the plugins of one file that were asked for."""
        return sorted(self._entries, key=BY_NAME)

    def is_loaded(self, entry: PluginEntry) -> bool:
        """Return whether this plugin was asked for and loaded without an error."""
        return entry in self._loaded

    def hooks_of(self, entry: PluginEntry) -> list[str]:
        """Return the hooks that a loaded plugin implements, sorted."""
        return self.hooks.implemented_by(self._modules[entry.target]) if entry in self._loaded else []

    def register_builtin(self, listener: object, name: str) -> None:
        """Add a listener that comes with core: a module or an object with hook implementations.

        Raises:
            PluginError: it does not fit the hooks.
        """
        try:
            self.hooks.add(listener, name)
        except HookError as error:
            raise PluginError(f"built-in listener {name}: {error}", cause=error) from error

    def find(self, kind: str, name: str) -> PluginEntry:
        """Return the plugin of this kind and name, from metadata alone, or the file that a name stands for.

        Raises:
            PluginError: there is none, or more than one distribution offers it, or the file is not to be trusted.
        """
        found = [entry for entry in self._entries if (entry.kind, entry.name) == (kind, name)]
        if not found and FileName.parse(name) is not None:
            found = [self._add_file(kind, name)]
        if not found:
            raise PluginError(self._missing(kind, name))
        if len(found) > 1:
            origins = " and ".join(entry.origin for entry in found)
            raise PluginError(f"{kind} {name!r} is offered by both {origins}: uninstall all but one")
        return found[0]

    def load(self, kind: str, name: str) -> type[Plugin]:
        """Return the class of a plugin. Loading it again gives the same class.

        Raises:
            PluginError: it is not installed, is offered twice, cannot be imported, was made for another version of the
                API, misspells a hook, or does not offer a sound class of this name. The message is one line.
            ValueError: there is no such kind with classes. Always the caller's mistake.
        """
        contract = self._contracts.get(kind)
        if contract is None:
            raise ValueError(f"plugins of kind {kind!r} have no class")
        entry = self.find(kind, name)
        module = self._module(entry)
        cls = _class_in_file(entry, module, contract) if entry.is_file else self._offered_as(entry, module, contract)
        _check_class(entry, cls)
        self._loaded.add(entry)
        return cls

    def offered(self, kind: str, entry: PluginEntry) -> list[type[Plugin]]:
        """Return all classes of a kind that the module of a plugin offers, whatever the plugin's own kind and name.

        A plugin of one file is one class.

        Raises:
            PluginError: as `load`, or the module offers none of this kind.
        """
        if entry.is_file:
            return [self.load(kind, entry.name)] if entry.kind == kind else []
        classes = list(self._offered(kind, entry, self._module(entry)).values())
        for cls in classes:
            _check_class(entry, cls)
        self._loaded.add(entry)
        return classes

    def listen(self, name: str) -> None:
        """Load a plugin of the kind ``hook``, which only listens.

        Raises:
            PluginError: as `load`, or the module implements no hook.
        """
        entry = self.find(LISTENER_KIND, name)
        if entry.is_file and not name.endswith(".py"):
            raise _plugin_error(entry, "the name is that of the file alone, without a class")
        module = self._module(entry)
        if not self.hooks.implemented_by(module):
            raise _plugin_error(
                entry, f"module {entry.target} implements no hook; is a function marked with @hookimpl?"
            )
        self._loaded.add(entry)

    def _add_file(self, kind: str, name: str) -> PluginEntry:
        try:
            entry = PluginEntry.of_file(kind, name, self._files.locate(name))
        except ConfigError as error:
            raise PluginError(f"{kind.replace('_', ' ')} {name!r}: {error}", cause=error) from error
        self._entries.append(entry)
        return entry

    def _missing(self, kind: str, name: str) -> str:
        names = sorted({entry.name for entry in self._entries if entry.kind == kind})
        built_in = [NO_ADMISSION] if kind == "admission" else []
        listed = [*(f"{word} (built in)" for word in built_in), *names]
        known = f"installed: {', '.join(listed)}" if listed else "none is installed"
        close = difflib.get_close_matches(name, [*built_in, *names], n=1)
        ours = _OURS.get((kind, name)) or _OURS.get((kind, ""))
        if ours is None:
            ours = f"ours are called dynamo-plugin-{kind.replace('_', '-')}-NAME"
        # A name that is nearly right is a slip: advice to install it would lead to a package of a stranger.
        hint = f"did you mean {close[0]!r}?" if close else "install the distribution that offers it"
        if not close and kind in KINDS:
            hint += f" ({ours})"
        return f"there is no {kind.replace('_', ' ')} {name!r} ({known}): {hint}"

    def _module(self, entry: PluginEntry) -> ModuleType:
        known = self._modules.get(entry.target)
        if known is not None:
            return known
        if ":" in entry.target and not entry.is_file:
            raise _plugin_error(entry, f"its entry point must name a module, not {entry.target!r}")
        try:
            module = _import_file(entry) if entry.is_file else import_module(entry.target)
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise _plugin_error(entry, f"cannot be imported: {_cause(error)}", error) from error
        made_for = getattr(module, "DYNAMO_API", None)
        if made_for is None:
            raise _plugin_error(entry, f"module {entry.target} does not say which DYNAMO_API it was made for")
        if made_for != DYNAMO_API:
            remedy = f"install versions of {entry.distribution} and dynamo-core that go together"
            raise _plugin_error(
                entry,
                f"was made for DYNAMO_API {made_for}, but this dynamo-core has {DYNAMO_API}: "
                f"{'bring the file up to date' if entry.is_file else remedy}",
            )
        try:
            self.hooks.add(module, entry.target)
        except HookError as error:
            raise _plugin_error(entry, str(error), error) from error
        self._modules[entry.target] = module
        return module

    def _offered(self, kind: str, entry: PluginEntry, module: ModuleType) -> dict[str, type[Plugin]]:
        classes = self._classes.get((kind, entry.target))
        if classes is None:
            classes = self._classes[kind, entry.target] = self._offered_classes(entry, module, self._contracts[kind])
        return classes

    def _offered_as(self, entry: PluginEntry, module: ModuleType, contract: Contract) -> type[Plugin]:
        classes = self._offered(entry.kind, entry, module)
        cls = classes.get(entry.name)
        if cls is None:
            names = ", ".join(sorted(classes)) or "none"
            raise _plugin_error(
                entry, f"{contract.hook} offers no class with NAME = {entry.name!r} (it offers: {names})"
            )
        return cls

    def _offered_classes(self, entry: PluginEntry, module: ModuleType, contract: Contract) -> dict[str, type[Plugin]]:
        register = self.hooks.implementation(contract.hook, module)
        if register is None:
            hint = ": mark it with @hookimpl" if hasattr(module, contract.hook) else ""
            raise _plugin_error(entry, f"module {entry.target} does not implement {contract.hook}{hint}")
        try:
            offered = register()
        except (Exception, SystemExit) as error:
            raise _plugin_error(entry, f"{contract.hook} failed: {_cause(error)}", error) from error
        if not isinstance(offered, list | tuple):
            raise _plugin_error(entry, f"{contract.hook} must return a list of classes, not {type(offered).__name__}")
        base = contract.load()
        classes: dict[str, type[Plugin]] = {}
        for item in offered:
            cls = _checked_type(entry, item, base)
            if cls.NAME in classes:
                raise _plugin_error(
                    entry, f"{classes[cls.NAME].__name__} and {cls.__name__} have the same NAME {cls.NAME!r}"
                )
            classes[cls.NAME] = cls
        return classes


class _TrustedFile(ExecutionLoader):
    """Imports a plugin of one file. Compiled files beside it are ignored: their owner is not checked."""

    def __init__(self, path: str) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_source(self, fullname: str) -> str:
        return decode_source(read_trusted(Path(self._path)))


def _import_file(entry: PluginEntry) -> ModuleType:
    """Run a plugin of one file as a module, whose name is the same in every process."""
    loader = _TrustedFile(entry.target)
    name = f"dynamo_file_{zlib.crc32(entry.target.encode()):08x}_{Path(entry.target).stem}"
    spec = ModuleSpec(name, loader, origin=entry.target)
    # The file may want to know where it is.
    spec.has_location = True
    module = module_from_spec(spec)
    # Dataclasses and pydantic look up annotations in the module of a class.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ConfigError):
            raise _plugin_error(entry, str(error), error) from error
        raise
    return module


def _class_in_file(entry: PluginEntry, module: ModuleType, contract: Contract) -> type[Plugin]:
    parsed = FileName.parse(entry.name)
    name = "" if parsed is None else parsed.class_name
    base = contract.load()
    if not name:
        raise _plugin_error(entry, f"the name needs the class too: {entry.name}:CLASS")
    item = getattr(module, name, None)
    if item is None:
        known = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)]
        close = difflib.get_close_matches(name, known, n=1)
        raise _plugin_error(entry, f"there is no class {name}" + (f"; did you mean {close[0]}?" if close else ""))
    cls = _checked_type(entry, item, base)
    if not cls.NAME:
        raise _plugin_error(entry, f"{name} has no NAME")
    return cls


def _checked_type(entry: PluginEntry, item: Any, base: type[Plugin]) -> type[Plugin]:
    if not inspect.isclass(item) or not issubclass(item, base):
        what = item.__name__ if inspect.isclass(item) else repr(item)
        raise _plugin_error(entry, f"{what} is not a class made from {base.__name__}")
    return item


def _check_class(entry: PluginEntry, cls: type[Plugin]) -> None:
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise _plugin_error(entry, f"{cls.__name__} does not define {', '.join(missing)}")
    config: object = cls.Config
    if not inspect.isclass(config) or not issubclass(config, PluginConfig):
        raise _plugin_error(entry, f"{cls.__name__}.Config is not made from PluginConfig")
    for name, field in config.model_fields.items():
        if PluginRef in (field.annotation, *get_args(field.annotation)):
            # Layers are merged before plugins are loaded: they know where another section stands by its name alone.
            optional = field.is_required() or field.default is None
            if entry.kind != "router" or name != NESTED or not optional:
                raise _plugin_error(
                    entry,
                    f"{cls.__name__}.Config.{name} is a PluginRef: only routers can have one, which must be called "
                    f"{NESTED!r} and have no other default than None",
                )


def _plugin_error(entry: PluginEntry, what: str, cause: BaseException | None = None) -> PluginError:
    return PluginError(f"{entry.kind} {entry.name!r} ({entry.origin}): {what}", cause=cause)


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
