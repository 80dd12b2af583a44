"""The layers that are not files: environment, ``--set``, and flags."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dynamo_core.errors import ConfigError

from dynamo_runtime.settings.documents import parse_text
from dynamo_runtime.settings.flag_table import FLAGS, PROCESS_NAMES
from dynamo_runtime.settings.frontends import join_frontends
from dynamo_runtime.settings.known_keys import Shape
from dynamo_runtime.settings.layers import assign, check, expand, merge
from dynamo_runtime.settings.secrets_in_settings import HIDDEN, redacted
from dynamo_runtime.settings.tree import Node, Path, Table, find, from_plain, replace_at, to_plain

log = logging.getLogger(__name__)

PREFIX = "DYN_"
_SEPARATOR = "__"


def environment_layer(env: Mapping[str, str], shape: Shape, tree: Table) -> Table:
    """Return everything in `env` that begins with ``DYN_``. Empty variables count as not set.

    `tree` is what it is laid over. A nested name beats a flat one for the same key, and a deeper one beats a mapping
    given as a whole.

    Raises:
        ConfigError: a variable is not known.
    """
    flat = {flag.env: flag for flag in FLAGS if flag.env is not None}
    workers = worker_names(tree)
    nested: list[tuple[Path, str]] = []
    short: list[str] = []
    for name in sorted(env):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in PROCESS_NAMES:
            continue
        if upper in flat:
            short.append(name)
            continue
        path = _nested_path(upper, workers)
        if not _is_known(path, shape):
            raise ConfigError(f"environment {name}: unknown setting{_suggestion(upper, path, shape, workers)}")
        nested.append((path, name))

    layer = Table("environment")
    for path, name in sorted(nested, key=lambda entry: len(entry[0])):
        if env[name]:
            node = parse_text(env[name], f"environment {name}")
            layer = _over(layer, _checked(path, node, shape))
    everyone = _with_new_workers(workers, layer)
    for name in short:
        text = _lenient_seconds(name, env[name]) if flat[name.upper()].lenient else env[name]
        if text:
            node = parse_text(text, f"environment {name}")
            for path in expand(flat[name.upper()].path, everyone, tree, to_plain(node)):
                if find(layer, path) is None:
                    layer = assign(layer, path, node)
    return layer


def _lenient_seconds(name: str, text: str) -> str:
    """Replace a number below zero by zero, and a text that is no number by the empty text, the default."""
    try:
        number = float(text or 0)
        if not math.isfinite(number):
            raise ValueError(text)
    except ValueError:
        log.warning("environment %s: %r is not a number of seconds; the default is used", name, text)
        return ""
    return text.strip() if number >= 0 else "0"


def set_layer(sets: Sequence[str], shape: Shape) -> Table:
    """Return the ``--set a.b=value`` arguments; later ones win.

    Raises:
        ConfigError: an argument has no ``=`` or an unknown key.
    """
    layer = Table("--set")
    for argument in sets:
        key, equals, text = argument.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {key}: expected KEY=VALUE, such as --set router.use=round-robin")
        origin = f"--set {'.'.join(path)}={_displayable(path, text)}"
        node = parse_text(text, origin)
        layer = _over(layer, _checked(path, node, shape))
    return layer


def _checked(path: Path, node: Node, shape: Shape) -> Table:
    """Return a layer of one value; a list of frontends is made one section, as in a file."""
    layer = join_frontends(replace_at(Table(node.origin), path, node))
    check(layer, shape)
    return layer


def _over(layer: Table, value: Table) -> Table:
    """Return the layer with a later value over it; one that picks an API does not mean those of a list before it."""
    frontend = layer.children.get("frontend")
    if isinstance(frontend, Table) and find(value, ("frontend", "use")) and not find(value, ("frontend", "apis")):
        alone = {key: node for key, node in frontend.children.items() if key != "apis"}
        layer = replace_at(layer, ("frontend",), replace(frontend, children=alone))
    return merge(layer, value)


def _displayable(path: Path, text: str) -> str:
    """Return the text of an argument as origins may show it."""
    value = to_plain(parse_text(text, ""))
    shown = redacted(path, value)
    return text if shown == value else str(redacted(path, text) if isinstance(value, str) else HIDDEN)


def flag_layer(flags: Mapping[str, object], tree: Table) -> Table:
    """Return command-line flags by name, as in ``{"--http-port": 8000}``; None means not given.

    `tree` is what is below.

    Raises:
        ConfigError: there is no such flag.
    """
    known = {flag.flag: flag for flag in FLAGS if flag.flag is not None}
    workers = worker_names(tree)
    layer = Table("flags")
    for name, value in flags.items():
        if value is None:
            continue
        if name not in known:
            raise ConfigError(f"flag {name}: unknown flag{_closest(name, known)}")
        for path in expand(known[name].path, workers, tree, value):
            layer = assign(layer, path, from_plain(value, f"flag {name}"))
    return layer


def option_layer(options: Mapping[str, tuple[str, object]]) -> Table:
    """Return flags that are not in the table: the key that each sets, and its value.

    Texts are read as those of ``--set``.
    """
    layer = Table("flags")
    for name, (key, value) in options.items():
        origin = f"flag {name}"
        node = parse_text(value, origin) if isinstance(value, str) else from_plain(value, origin)
        layer = assign(layer, tuple(key.split(".")), node)
    return layer


def environment_name(path: Iterable[str]) -> str:
    """Return the nested environment name of a key."""
    return PREFIX + _SEPARATOR.join(path).upper()


def worker_names(table: Table) -> tuple[str, ...]:
    """Return the workers in a tree."""
    workers = table.children.get("workers")
    return tuple(workers.children) if isinstance(workers, Table) else ()


def _with_new_workers(workers: Sequence[str], layer: Table) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*workers, *worker_names(layer))))


def _nested_path(name: str, workers: Sequence[str]) -> Path:
    rest = name[len(PREFIX) :].lower()
    first, separator, below = rest.partition(_SEPARATOR)
    if first == "workers" and separator:
        # A worker's name may hold the separator, or end in an underscore: known names are matched as a whole.
        for worker in sorted(workers, key=len, reverse=True):
            if below == worker:
                return (first, worker)
            if below.startswith(worker + _SEPARATOR):
                return (first, worker, *below[len(worker) + len(_SEPARATOR) :].split(_SEPARATOR))
    return tuple(rest.split(_SEPARATOR))


def _is_known(path: Path, shape: Shape) -> bool:
    for index, key in enumerate(path):
        if not key:
            return False
        inner = shape.child(key)
        if inner is None:
            return (shape.is_section or shape.entry is not None) and all(path[index:])
        shape = inner
    return True


def _suggestion(name: str, path: Path, shape: Shape, workers: Sequence[str]) -> str:
    known = {flag.env for flag in FLAGS if flag.env is not None} | set(PROCESS_NAMES)
    known.update(environment_name(key) for key in _keys(shape, workers))
    # One wrong part in front of a plugin's key: put it right and keep the rest.
    for index, key in enumerate(path):
        inner = shape.child(key)
        if inner is not None:
            shape = inner
            continue
        close = difflib.get_close_matches(key, list(shape.fields), n=1)
        known.update(environment_name((*path[:index], right, *path[index + 1 :])) for right in close)
        break
    return _closest(name, known)


def _closest(name: str, known: Iterable[str]) -> str:
    # The common beginning of all names must not make them look alike.
    by_rest = {_rest(right): right for right in sorted(known)}
    close = difflib.get_close_matches(_rest(name), by_rest, n=1, cutoff=0.7)
    return f"; did you mean {by_rest[close[0]]}?" if close else "; see docs/reference/configuration.md for the names"


def _rest(name: str) -> str:
    return name.removeprefix(PREFIX).removeprefix("--")


def _keys(shape: Shape, workers: Sequence[str], path: Path = ()) -> Iterable[Path]:
    for key, inner in shape.fields.items():
        if inner.is_table:
            yield from _keys(inner, workers, (*path, key))
        else:
            yield (*path, key)
    if shape.each is not None:
        for worker in workers:
            yield from _keys(shape.each, workers, (*path, worker))
