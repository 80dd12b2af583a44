"""Reading the config file: YAML or TOML into a tree that remembers line numbers."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml
from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file

from dynamo_runtime.settings.tree import Leaf, Node, Path, Table, from_plain, to_plain

_MERGE_TAG = "tag:yaml.org,2002:merge"


class Document(NamedTuple):
    """A file that was read: its tree, and who owned it then."""

    tree: Table
    status: os.stat_result


def read_document(path: FilePath, named_by: str = "") -> Document:
    """Return the file as a tree with origins ``path:line``. `named_by` says what names the file, if not the caller.

    Raises:
        ConfigError: it cannot be read, is not valid, has a key twice, or does not hold a mapping.
    """
    try:
        data, status = read_file(path)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{named_by}{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a UTF-8 text file") from None
    try:
        read = _read_toml if path.suffix.lower() == ".toml" else _read_yaml
        return Document(read(text, str(path)), status)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None


def parse_text(text: str, origin: str) -> Node:
    """Return the value that was meant by a text on the command line or in the environment.

    ``[…]``, ``{…}`` and quoted texts are read as YAML, which includes JSON; anything else as one YAML scalar, so that
    ``#`` and ``: `` in passwords and addresses are just characters. What cannot be read is the text itself, without
    the space around it; quotes keep that. A text of several lines is taken as it is.
    """
    stripped = text.strip()
    if not stripped or "\n" in stripped:
        return Leaf(text, origin, text)
    loader = yaml.SafeLoader("")
    try:
        structured = stripped[0] in "[{" or (stripped[0] in "\"'" and len(stripped) > 1 and stripped[-1] == stripped[0])
        if structured:
            node = _read_json(stripped)
            if node is not None:
                return _relabelled_text(node, origin, stripped)
        else:
            tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))  # type: ignore[no-untyped-call]
            return Leaf(_construct(loader, yaml.ScalarNode(tag, stripped)), origin, stripped)
        return _relabelled_text(_read_node(stripped), origin, stripped)
    except (yaml.YAMLError, ConfigError, RecursionError):
        return Leaf(stripped, origin, stripped)
    finally:
        loader.dispose()


def _read_json(text: str) -> Node | None:
    """Read JSON, which is nearly YAML but spells astral characters and large floats in ways of its own."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    try:
        return from_plain(json.loads(text, object_pairs_hook=once), "")
    except ValueError:
        return None


def _relabelled_text(node: Node, origin: str, text: str) -> Node:
    if isinstance(node, Leaf):
        return Leaf(node.value, origin, node.value if isinstance(node.value, str) else text)

    def relabel(child: Node) -> Node:
        if isinstance(child, Table):
            return Table(origin, {key: relabel(below) for key, below in child.children.items()})
        return Leaf(child.value, origin, child.text)

    return Table(origin, {key: relabel(child) for key, child in node.children.items()}, text)


# YAML


def _read_yaml(text: str, name: str) -> Table:
    try:
        node = _read_node(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        raise ConfigError(f"{where}: is not valid YAML: {_yaml_problem(error)}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{name}: is not valid YAML: it holds characters that are not allowed") from None
    if isinstance(node, Leaf) and node.value is None:
        return Table(name)
    if not isinstance(node, Table):
        raise ConfigError(f"{node.origin}: expected a mapping of settings, such as 'router: {{use: round-robin}}'")
    return node


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    # These two messages quote what was written, which may be a password.
    if isinstance(error, yaml.composer.ComposerError) and "alias" in str(error.problem):
        return "a value begins with '*' but names no anchor; put it in quotes"
    if isinstance(error, yaml.constructor.ConstructorError):
        return "a value begins with '!' but names no known tag; put it in quotes"
    return str(error.problem or error.context or "cannot be read")


def _read_node(text: str, name: str = "") -> Node:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Leaf(None, name)
        return _convert(loader, root, name, frozenset())
    finally:
        loader.dispose()


def _construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    try:
        return loader.construct_object(node)
    except ValueError:
        # It looks like a date or a number but is none, such as 2024-13-99.
        return node.value


def _convert(loader: yaml.SafeLoader, node: yaml.Node, name: str, above: frozenset[int]) -> Node:
    origin = f"{name}:{node.start_mark.line + 1}" if node.start_mark is not None else name
    if id(node) in above:
        raise ConfigError(f"{origin}: an alias refers to itself")
    above = above | {id(node)}
    if isinstance(node, yaml.MappingNode):
        return Table(origin, _mapping(loader, node, name, above))
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(loader, item, name, above) for item in node.value)
        return Leaf([to_plain(item) for item in items], origin, items=items)
    assert isinstance(node, yaml.ScalarNode)  # noqa: S101 - the third and last kind of node
    return Leaf(_construct(loader, node), origin, node.value)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, name: str, above: frozenset[int]) -> dict[str, Node]:
    children: dict[str, Node] = {}
    inherited: dict[str, Node] = {}
    lines: dict[Hashable, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{line}: a key must be a plain word")
        key = str(key_node.value)
        if key in lines:
            raise ConfigError(_duplicate_key(f"{name}:{line}", key, lines[key]))
        lines[key] = line
        if key_node.tag == _MERGE_TAG:
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                table = _convert(loader, source, name, above)
                if not isinstance(table, Table):
                    raise ConfigError(f"{name}:{line}: '<<' expects a mapping")
                inherited = {**table.children, **inherited}
            continue
        child = _convert(loader, value_node, name, above)
        # Messages name the line of the key; its value may begin further down.
        children[key] = _at_line(child, f"{name}:{line}")
    return {**inherited, **children}


def _duplicate_key(where: str, key: str, first: int) -> str:
    return f"{where}: key '{key}' is given twice; the first is in line {first}"


def _at_line(node: Node, origin: str) -> Node:
    return replace(node, origin=origin)


# TOML

_HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
#: How tomllib begins its message about a repeated key; it names neither the key nor, sometimes, the line.
_TOML_DUPLICATE = ("Cannot overwrite", "Cannot declare")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def _read_toml(text: str, name: str) -> Table:
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        # Some are tomllib's, others Python's, which reads no number of thousands of digits.
        problem, _, location = str(error).partition(" (at ")
        if problem.startswith(_TOML_DUPLICATE) and (twice := _toml_duplicate(text)) is not None:
            line, path, first = twice
            raise ConfigError(_duplicate_key(f"{name}:{line}", ".".join(path), first)) from None
        at_line = re.match(r"line (\d+)", location)
        where = f"{name}:{at_line[1]}" if at_line else name
        raise ConfigError(f"{where}: is not valid TOML: {problem}") from None
    lines = _toml_lines(text)

    def convert(value: object, path: Path, line: int) -> Node:
        line = lines.get(path, line)
        if isinstance(value, dict):
            return Table(f"{name}:{line}", {key: convert(child, (*path, key), line) for key, child in value.items()})
        node = from_plain(value, f"{name}:{line}")
        if isinstance(node, Leaf) and isinstance(value, list):
            items = tuple(convert(child, (*path, str(index)), line) for index, child in enumerate(value))
            return replace(node, items=items)
        return node

    return Table(name, {key: convert(child, (key,), 1) for key, child in document.items()})


class _TomlKey(NamedTuple):
    """A header, or the key of a value with the `prefix` of the header above it, and its line."""

    line: int
    prefix: Path
    path: Path
    header: bool = False
    #: Whether the header begins a further entry of a list.
    entry: bool = False


def _toml_keys(text: str) -> Iterator[_TomlKey]:
    """Yield the headers and keys of a document: tomllib keeps no lines.

    A look is enough, as it has read the document.
    """
    prefix: Path = ()
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if closing is not None:
            if line.count(closing) % 2:
                closing = None
            continue
        if header := _HEADER.match(line):
            prefix = _toml_path(header[1])
            yield _TomlKey(number, (), prefix, header=True, entry=line.lstrip().startswith("[["))
            continue
        if key := _ASSIGNMENT.match(line):
            yield _TomlKey(number, prefix, (*prefix, *_toml_path(key[1])))
        closing = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), None)


def _toml_lines(text: str) -> dict[Path, int]:
    """Return the line of each key and header. A number in a path stands for an entry of a list."""
    lines: dict[Path, int] = {}
    entries: Counter[Path] = Counter()

    def numbered(path: Path) -> Path:
        whole: Path = ()
        for key in path:
            whole = (*whole, key)
            whole = (*whole, str(entries[whole] - 1)) if whole in entries else whole
        return whole

    for key in _toml_keys(text):
        if key.entry:
            above = (*numbered(key.path[:-1]), key.path[-1])
            entries[above] += 1
            lines.setdefault(above, key.line)
        prefix = numbered(key.prefix)
        path = numbered(key.path)
        for depth in range(len(prefix) + 1, len(path) + 1):
            if depth == len(path) or not key.header:
                lines.setdefault(path[:depth], key.line)
    return lines


def _toml_duplicate(text: str) -> tuple[int, Path, int] | None:
    """Return the first key of a refused document that is given twice: its line, the key, and where it was first."""
    values: dict[Path, int] = {}
    #: Tables that keys with dots have made.
    dotted: dict[Path, int] = {}
    for line, prefix, path, header, entry in _toml_keys(text):
        if entry:
            # A further entry begins: what the ones before it hold does not count.
            for known in (values, dotted):
                for other in [other for other in known if other[: len(path)] == path]:
                    del known[other]
            continue
        before = [] if header else [path[:depth] for depth in range(len(prefix) + 1, len(path))]
        for one in (*before, path):
            first = values.get(one, dotted.get(one) if one == path else None)
            if first is not None:
                return line, one, first
        values[path] = line
        dotted |= {one: line for one in before if one not in dotted}
    return None


def _toml_path(text: str) -> Path:
    return tuple(part.strip("\"'") for part in _KEY_PART.findall(text))
