"""Loading the configuration: the layers in their order, then validation in two phases."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeVar

from dynamo_core.contracts.config import NESTED, PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file
from dynamo_core.plugin_files import NO_FILES, PluginFiles, names_in

from dynamo_runtime.settings.documents import Document, read_document
from dynamo_runtime.settings.entries import assign_section_keys, by_entry_name
from dynamo_runtime.settings.frontends import join_frontends
from dynamo_runtime.settings.known_keys import Shape, shape_of, suggestion
from dynamo_runtime.settings.layers import check, fill, merge, plugin_choices
from dynamo_runtime.settings.model import CERTIFICATE_FILES, Settings
from dynamo_runtime.settings.secrets_in_settings import referenced_files, resolve
from dynamo_runtime.settings.sources import environment_layer, flag_layer, set_layer, worker_names
from dynamo_runtime.settings.tree import DEFAULT, Leaf, Node, Table, find, from_plain, leaves, relabelled, to_plain
from dynamo_runtime.settings.validation import ValidationSubject, validate, validate_lenient

ConfigT = TypeVar("ConfigT", bound=PluginConfig)

#: The configuration without a file: everything in one process, answered by the mocker.
EXAMPLE: dict[str, Any] = {
    "workers": {"mock": {"model": {"name": "mock-model"}, "engine": {"use": "mocker"}, "replicas": 1}},
}
#: The origin of its values.
EXAMPLE_ORIGIN = "built-in example"
#: Characters of engine names that worker names may not have.
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_]")


class SettingsView:
    """The configuration as it is shown, and where each value came from."""

    def __init__(self, tree: Table) -> None:
        self.tree = tree

    def origin(self, key: str) -> str:
        """Return where a key was set: ``config.yaml:12``, ``environment DYN_LOG``, …; ``default`` if nowhere."""
        node = find(self.tree, key.split("."))
        return node.origin if node is not None else DEFAULT

    def shown(self, key: str) -> Any:
        """Return the value of a key as dumps show it; None if it is not set."""
        node = find(self.tree, key.split("."))
        return None if node is None else to_plain(node, redact=True)

    def dump(self, *, redact: bool = True) -> dict[str, Any]:
        """Return the merged tree with the defaults of core; a new dictionary.

        Secrets are ``***`` unless `redact` is false. A plugin's defaults are not in it: they are known to its own model
        only.
        """
        dump: dict[str, Any] = copy.deepcopy(to_plain(self.tree, redact=redact))
        return dump

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return every value as (key, value without secrets, origin), in the order of the configuration."""
        return [(".".join(path), leaf.display, leaf.origin) for path, leaf in leaves(self.tree)]


class LoadedSettings(SettingsView):
    """The settings, and where each of them came from.

    `again` loads them once more from the same sources; `files` are those that they were read from. `plugin_files` are
    the plugins of one file that the config file names.
    """

    def __init__(
        self,
        settings: Settings,
        tree: Table,
        again: Callable[[], LoadedSettings],
        files: Collection[FilePath] = (),
        plugin_files: PluginFiles = NO_FILES,
    ) -> None:
        super().__init__(tree)
        self.settings = settings
        self.again = again
        self.plugin_files = plugin_files
        #: The digests of certificate files by the keys that name them.
        self.certificates = {key: _digest(path) for key in CERTIFICATE_FILES if (path := self._value(key))}
        self.files = frozenset(files) | {FilePath(self._value(key)) for key in self.certificates}

    def fingerprint(self, *, without: Collection[str] = ()) -> str:
        """Return a digest of all values and certificates, secrets too, except some keys."""
        values = [(".".join(path), leaf.value) for path, leaf in leaves(self.tree)]
        kept = [row for row in values if row[0] not in without]
        return sha256(repr((kept, sorted(self.certificates.items()))).encode()).hexdigest()

    def _value(self, key: str) -> str:
        leaf = find(self.tree, key.split("."))
        return str(leaf.value or "") if isinstance(leaf, Leaf) else ""

    def plugin_config(self, section_path: str, config_cls: type[ConfigT]) -> ConfigT:
        """Validate the plugin keys of a section, such as ``workers.mock.engine``, as the plugin's own model.

        The section may be an entry of a list, such as ``admission.fair-queue``, or that of a wrapped router, such as
        ``router.then``.

        Raises:
            ConfigError: a key is unknown, missing or wrong; one line with its origin.
            KeyError: there is no such section.
        """
        path = tuple(section_path.split("."))
        shape = _shape().at(_generic(path))
        section = find(self.tree, path)
        if shape is None or not shape.is_section or not isinstance(section, Table):
            raise KeyError(section_path)
        own = {key: node for key, node in section.children.items() if key not in shape.fields}
        use = section.children.get("use")
        name = use.value if isinstance(use, Leaf) else None
        listed = section.children.get("apis")
        if isinstance(listed, Leaf) and listed.value:
            name = "' and '".join(listed.value)
        # A section that is not in the configuration exists because of the setting that picked the plugin.
        origin = section.origin if section.origin != DEFAULT or use is None else use.origin
        known = replace(shape_of(config_cls), fields={**shape.fields, **shape_of(config_cls).fields})
        above = find(self.tree, path[:-1])
        kind = path[-2] if isinstance(above, Table) and above.listed else [key for key in path if key != NESTED][-1]
        subject = ValidationSubject(known, path, f"{kind} '{name}'" if name else kind, origin)
        config, _ = validate(lambda values: config_cls.model_validate(values), Table(origin, own), subject)
        return config


def load_settings(
    path: FilePath | None = None,
    *,
    profile: str | None = None,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    below: Table | None = None,
    above: Table | None = None,
) -> LoadedSettings:
    """Merge all layers and validate what belongs to core. Nothing but `env` is read as the environment.

    `LoadedSettings.again` does the same with the same arguments.

    Args:
        path: the file; ``DYN_CONFIG`` in `env` if None; the built-in example if that is not set either.
        profile: the profile of the file to lay over it; ``DYN_PROFILE`` in `env` if None.
        env: the environment, for ``DYN_…`` settings and for ``${env:…}``.
        sets: ``--set`` arguments, ``key=value`` each.
        flags: values by flag name, such as ``{"--http-port": 8000}``; None means not given.
        below: a layer under the file, in place of the built-in example.
        above: a layer over everything else.

    Raises:
        ConfigError: one line saying where, what, and how to mend it.
    """
    env = dict(env)

    def load() -> LoadedSettings:
        file = _NamedFile.read(path, env)
        merged = _merged(file, profile, env, sets, flags, below, above)
        settings, tree = validate(_build, resolve(merged, env), _subject(path))
        files = referenced_files(merged)
        if file is None:
            return LoadedSettings(settings, tree, load, files)
        return LoadedSettings(settings, tree, load, files | {file.path}, file.plugin_files())

    return load()


def view_settings(
    path: FilePath | None = None,
    *,
    profile: str | None = None,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> SettingsView:
    """Load like `load_settings`, to look at: a value whose variable or file is missing is shown, and is no error.

    Raises:
        ConfigError: something else is wrong.
    """
    tree = _merged(_NamedFile.read(path, env), profile, env, sets, flags)
    _, tree = validate_lenient(_build, resolve(tree, env, lenient=True), _subject(path))
    return SettingsView(tree)


def _digest(path: str) -> str:
    """Return the digest of a file; empty if it cannot be read, which is told where it is used."""
    try:
        return sha256(read_file(path, pipe=False).data).hexdigest()
    except OSError:
        return ""


def section_of(tree: Table, path: Sequence[str]) -> tuple[str, ...] | None:
    """Return the plugin's section that a key of a tree belongs to, if it is one of the plugin's own keys."""
    shape: Shape | None = _shape()
    node: Node | None = tree
    for index, key in enumerate(path):
        if isinstance(node, Table) and node.listed and shape is not None:
            shape = shape.entry
        elif shape is None or (shape.is_section and shape.child(key) is None):
            return None if shape is None else tuple(path[:index])
        else:
            shape = shape.child(key)
        node = node.children.get(key) if isinstance(node, Table) else None
    return None


def _build(values: dict[str, Any]) -> Settings:
    return Settings(**values)


def _subject(path: FilePath | None) -> ValidationSubject:
    return ValidationSubject(_shape(), origin=str(path or DEFAULT))


def _merged(
    file: _NamedFile | None,
    profile: str | None,
    env: Mapping[str, str],
    sets: Sequence[str],
    flags: Mapping[str, object] | None,
    below: Table | None = None,
    above: Table | None = None,
) -> Table:
    """Return all layers, one over the other, with the defaults below them."""
    shape = _shape()
    tree = _file_layers(file, _NamedSource.by(profile, "DYN_PROFILE", env), shape, below, flags)
    written = worker_names(tree)
    tree = merge(tree, by_entry_name(environment_layer(env, shape, tree), tree, shape, merge), shape)
    # A flag that picks a plugin picks it for the keys that --set gives on the same command line too.
    tree = merge(tree, plugin_choices(flag_layer(flags or {}, tree)), shape)
    tree = merge(tree, by_entry_name(set_layer(sets, shape), tree, shape, merge), shape)
    tree = merge(tree, flag_layer(flags or {}, tree), shape)
    if above is not None:
        tree = merge(tree, above, shape)
    _reject_incomplete_workers(tree, written)
    return fill(assign_section_keys(tree, shape), shape)


class _NamedSource(NamedTuple):
    """A file or a profile that the call or a variable names; `prefix` is put before messages about it."""

    name: str
    prefix: str

    @classmethod
    def by(cls, given: FilePath | str | None, variable: str, env: Mapping[str, str]) -> _NamedSource | None:
        if given is not None and str(given):
            return cls(str(given), "")
        return cls(env[variable], f"environment {variable}: ") if env.get(variable) else None


class _NamedFile(NamedTuple):
    """The config file, as it was read."""

    path: FilePath
    document: Document

    @classmethod
    def read(cls, path: FilePath | None, env: Mapping[str, str]) -> _NamedFile | None:
        source = _NamedSource.by(path, "DYN_CONFIG", env)
        if source is None:
            return None
        found = FilePath(source.name)
        return cls(found, read_document(found, source.prefix))

    def plugin_files(self) -> PluginFiles:
        """Return the plugins that the text of the file names, before any variable is filled in."""
        names = names_in(to_plain(self.document.tree))
        return PluginFiles(names, self.path.absolute().parent, self.path, self.document.status)


def _shape() -> Shape:
    return shape_of(Settings)


def _generic(path: Sequence[str]) -> tuple[str, ...]:
    return tuple("*" if index == 1 and path[0] == "workers" else key for index, key in enumerate(path))


def _example(engine: object) -> dict[str, Any]:
    """Return what runs when there is no file: the built-in example, or one worker of the engine that a flag names."""
    if not isinstance(engine, str) or not engine:
        return EXAMPLE
    model = {"name": f"{engine}-model"}
    return {"workers": {_NOT_IN_NAMES.sub("_", engine.lower()): {"model": model, "engine": {"use": engine}}}}


def _file_layers(
    file: _NamedFile | None,
    profile: _NamedSource | None,
    shape: Shape,
    below: Table | None,
    flags: Mapping[str, object] | None,
) -> Table:
    if file is None:
        if profile is not None:
            raise ConfigError(
                f"{profile.prefix}profile '{profile.name}': there is no config file to take it from; name one too"
            )
        if below is not None:
            return below
        workers = from_plain(_example((flags or {}).get("--engine")), EXAMPLE_ORIGIN)
        return Table(DEFAULT, workers.children if isinstance(workers, Table) else {})
    document = file.document.tree
    profiles = _profiles(document, shape)
    settings = Table(document.origin, {key: node for key, node in document.children.items() if key != "profiles"})
    settings = join_frontends(settings)
    check(settings, shape)
    tree = merge(below or Table(DEFAULT), settings, shape)
    if profile is None:
        return tree
    if profile.name not in profiles:
        hint = suggestion(profile.name, profiles)
        raise ConfigError(f"{profile.prefix}{file.path}: profile '{profile.name}' is not in the file{hint}")
    return merge(tree, profiles[profile.name], shape)


def _profiles(document: Table, shape: Shape) -> dict[str, Table]:
    """Return all profiles of the file, checked for unknown keys whether they are used or not."""
    node = document.children.get("profiles")
    if node is None or (isinstance(node, Leaf) and node.value is None):
        return {}
    if isinstance(node, Leaf):
        raise ConfigError(f"{node.origin}: profiles: expected a mapping of profiles by name")
    profiles: dict[str, Table] = {}
    for name, content in node.children.items():
        if isinstance(content, Leaf):
            if content.value is not None:
                raise ConfigError(f"{content.origin}: profiles.{name}: expected a mapping of settings")
            content = Table(content.origin)
        profiles[name] = join_frontends(relabelled(content, f"profile {name}"))
        if "profiles" in content.children:
            raise ConfigError(f"{profiles[name].children['profiles'].origin}: a profile cannot hold profiles")
        check(profiles[name], shape)
    return profiles


def _reject_incomplete_workers(tree: Table, written: Sequence[str]) -> None:
    """Reject a worker that only the environment or --set names and that lacks its engine: it is misspelled."""
    for name in worker_names(tree):
        worker = find(tree, ("workers", name))
        if name in written or worker is None:
            continue
        if find(tree, ("workers", name, "engine", "use")) is None:
            raise ConfigError(f"{worker.origin}: unknown worker '{name}'{suggestion(name, written)}")
