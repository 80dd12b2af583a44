"""Loading the configuration: the layers in their order, then validation in two phases."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_core.settings.documents import read_document
from dynamo_core.settings.layers import check, fill, merge
from dynamo_core.settings.model import Settings
from dynamo_core.settings.redaction import resolve
from dynamo_core.settings.shape import Shape, shape_of, suggestion
from dynamo_core.settings.sources import environment_layer, flag_layer, set_layer, worker_names
from dynamo_core.settings.tree import DEFAULT, Leaf, Table, find, from_plain, leaves, plain, relabelled
from dynamo_core.settings.validation import Subject, validate

ConfigT = TypeVar("ConfigT", bound=PluginConfig)

#: What runs when there is no file: everything in one process, answered by the mocker.
EXAMPLE: dict[str, Any] = {
    "frontend": {"use": "openai"},
    "router": {"use": "round-robin"},
    "transport": {"use": "inproc"},
    "discovery": {"use": "memory"},
    "workers": {"mock": {"model": {"name": "mock-model"}, "engine": {"use": "mocker"}, "replicas": 1}},
}


class LoadedSettings:
    """The settings, and where each of them came from."""

    def __init__(self, settings: Settings, tree: Table) -> None:
        self.settings = settings
        self._tree = tree

    def origin(self, key: str) -> str:
        """Where a key was set: ``config.yaml:12``, ``environment DYN_LOG``, …; ``default`` if nowhere."""
        node = find(self._tree, key.split("."))
        return node.origin if node is not None else DEFAULT

    def dump(self, *, redact: bool = True) -> dict[str, Any]:
        """The merged tree with the defaults of core; a new dictionary. Secrets are ``***`` unless `redact` is false.

        A plugin's defaults are not in it: they are known to its own model only.
        """
        dump: dict[str, Any] = copy.deepcopy(plain(self._tree, redact=redact))
        return dump

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every value as (key, value without secrets, origin), in the order of the configuration."""
        return [(".".join(path), leaf.display, leaf.origin) for path, leaf in leaves(self._tree)]

    def plugin_config(self, section_path: str, config_cls: type[ConfigT]) -> ConfigT:
        """Phase two: the plugin keys of a section, such as ``workers.mock.engine``, as the plugin's own model.

        Raises:
            ConfigError: a key is unknown, missing or wrong; one line with its origin.
            KeyError: there is no such section.
        """
        path = tuple(section_path.split("."))
        shape = _shape().at(_generic(path))
        section = find(self._tree, path)
        if shape is None or not shape.is_section or not isinstance(section, Table):
            raise KeyError(section_path)
        own = {key: node for key, node in section.children.items() if key not in shape.fields}
        use = section.children.get("use")
        name = use.value if isinstance(use, Leaf) else None
        # A section that nobody wrote is there because of whatever picked the plugin.
        origin = section.origin if section.origin != DEFAULT or use is None else use.origin
        subject = Subject(shape_of(config_cls), path, f"{path[-1]} '{name}'" if name else path[-1], origin)
        config, _ = validate(lambda values: config_cls.model_validate(values), Table(origin, own), subject)
        return config


def load_settings(
    path: FilePath | None = None,
    *,
    profile: str | None = None,
    env: Mapping[str, str],
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> LoadedSettings:
    """Merges all layers and validates what belongs to core. Nothing but `env` is read as the environment.

    Args:
        path: the file; ``DYN_CONFIG`` in `env` if None; the built-in example if that is not set either.
        profile: the profile of the file to lay over it; ``DYN_PROFILE`` in `env` if None.
        env: the environment, for ``DYN_…`` settings and for ``${env:…}``.
        sets: ``--set`` arguments, ``key=value`` each.
        flags: values by flag name, such as ``{"--http-port": 8000}``; None means not given.

    Raises:
        ConfigError: one line saying where, what, and how to mend it.
    """
    shape = _shape()
    if path is None and env.get("DYN_CONFIG"):
        path = FilePath(env["DYN_CONFIG"])
    tree = _file_layers(path, profile or env.get("DYN_PROFILE") or None, shape)
    written = worker_names(tree)
    tree = merge(tree, environment_layer(env, shape, written), shape)
    tree = merge(tree, set_layer(sets, shape), shape)
    tree = merge(tree, flag_layer(flags or {}, worker_names(tree)), shape)
    _refuse_halves(tree, written)
    tree = resolve(fill(tree, shape), env)
    settings, tree = validate(lambda values: Settings(**values), tree, Subject(shape, origin=str(path or DEFAULT)))
    return LoadedSettings(settings, tree)


def _shape() -> Shape:
    return shape_of(Settings)


def _generic(path: Sequence[str]) -> tuple[str, ...]:
    return tuple("*" if index == 1 and path[0] == "workers" else key for index, key in enumerate(path))


def _file_layers(path: FilePath | None, profile: str | None, shape: Shape) -> Table:
    if path is None:
        if profile is not None:
            raise ConfigError(f"profile '{profile}': there is no config file to take it from; name one too")
        example = from_plain(EXAMPLE, DEFAULT)
        return example if isinstance(example, Table) else Table(DEFAULT)
    document = read_document(path)
    profiles = _profiles(document, shape)
    file = Table(document.origin, {key: node for key, node in document.children.items() if key != "profiles"})
    check(file, shape)
    tree = merge(Table(DEFAULT), file, shape)
    if profile is None:
        return tree
    if profile not in profiles:
        raise ConfigError(f"{path}: profile '{profile}' is not in the file{suggestion(profile, profiles)}")
    return merge(tree, profiles[profile], shape)


def _profiles(document: Table, shape: Shape) -> dict[str, Table]:
    """All profiles of the file, checked for unknown keys whether they are used or not."""
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
        profiles[name] = relabelled(content, f"profile {name}")
        if "profiles" in content.children:
            raise ConfigError(f"{profiles[name].children['profiles'].origin}: a profile cannot hold profiles")
        check(profiles[name], shape)
    return profiles


def _refuse_halves(tree: Table, written: Sequence[str]) -> None:
    """A worker that only the environment or --set speaks of, and that lacks its engine, is a misspelled one."""
    for name in worker_names(tree):
        worker = find(tree, ("workers", name))
        if name in written or worker is None:
            continue
        if find(tree, ("workers", name, "engine", "use")) is None:
            raise ConfigError(f"{worker.origin}: unknown worker '{name}'{suggestion(name, written)}")
