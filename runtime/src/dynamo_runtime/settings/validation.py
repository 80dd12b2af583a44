"""Validation by pydantic, with errors that name the origin of a value and never show a secret."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_core.contracts.config import SettingsMismatch
from dynamo_core.errors import ConfigError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dynamo_runtime.settings.known_keys import Shape, suggestion
from dynamo_runtime.settings.tree import Leaf, Node, Path, Table, location, replace_at, to_plain

ModelT = TypeVar("ModelT")

#: Errors that say a text was expected: then what was written is tried in place of what YAML made of it.
_WANTS_TEXT = frozenset({"string_type", "literal_error", "enum", "path_type", "url_type", "bytes_type"})

_EXPECTED = {
    "int_parsing": "an integer",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping of settings",
    "model_attributes_type": "a mapping of settings",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class ValidationSubject:
    """The name of the validated settings, for messages."""

    #: The keys it knows, for suggestions.
    shape: Shape
    #: Where it stands in the configuration.
    path: Path = ()
    #: For a plugin's section: its kind and name, such as ``engine 'mocker'``.
    owner: str = ""
    #: What to blame for a missing key, if the section itself has no better origin.
    origin: str = ""


def validate(
    build: Callable[[dict[str, Any]], ModelT], table: Table, subject: ValidationSubject
) -> tuple[ModelT, Table]:
    """Return the model that `build` makes of the table, and the table with the values as they were taken.

    Raises:
        ConfigError: one line about the first error; misspelled keys come first.
    """
    result, table = validate_lenient(build, table, subject)
    assert result is not None  # noqa: S101 - None is for trees with unfilled values, which are only looked at
    return result, table


def validate_lenient(
    build: Callable[[dict[str, Any]], ModelT], table: Table, subject: ValidationSubject
) -> tuple[ModelT | None, Table]:
    """Validate like `validate`, but unfilled values may be wrong: then there is no model.

    Raises:
        ConfigError: something else is wrong.
    """
    result, errors = _attempt(build, table)
    if result is None:
        table, changed = _retried_as_text(table, errors)
        if changed:
            result, errors = _attempt(build, table)
    if result is not None:
        return result, table
    errors = [error for error in errors if not _is_unfilled(table, error)]
    if not errors:
        return None, table
    errors.sort(key=lambda error: error["type"] != "extra_forbidden")
    # Raised outside of any handler: pydantic's error holds the values, and must not show up as the context of ours.
    raise ConfigError(" ".join(_message(table, errors[0], subject).split()))


def _attempt(build: Callable[[dict[str, Any]], ModelT], table: Table) -> tuple[ModelT | None, list[ErrorDetails]]:
    try:
        return build(to_plain(table)), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _is_unfilled(table: Table, error: ErrorDetails) -> bool:
    _, node, _ = _locate(table, error["loc"])
    return isinstance(node, Leaf) and node.unfilled


def _retried_as_text(table: Table, errors: Iterable[ErrorDetails]) -> tuple[Table, bool]:
    changed = False
    for error in errors:
        if error["type"] not in _WANTS_TEXT:
            continue
        path, node, rest = _locate(table, error["loc"])
        if path and not rest and node.text is not None and not (isinstance(node, Leaf) and node.value == node.text):
            leaf = Leaf(node.text, node.origin, node.text)
            if isinstance(node, Leaf) and node.hidden:
                leaf = Leaf(node.text, node.origin, node.text, node.shown, hidden=True)
            table = replace_at(table, path, leaf)
            changed = True
    return table, changed


def _locate(table: Table, loc: tuple[int | str, ...]) -> tuple[Path, Node, str]:
    """Return the deepest node on the way to an error, its path, and what follows inside it or is missing from it."""
    node: Node = table
    path: Path = ()
    rest = ""
    inside: Any = None
    for part in loc:
        if isinstance(node, Table):
            if node.listed and isinstance(part, int):
                part = list(node.children)[part]
            if part in node.children:
                node = node.children[str(part)]
                path = (*path, str(part))
                inside = node.value if isinstance(node, Leaf) else None
        elif isinstance(part, int) and isinstance(inside, list) and part < len(inside):
            rest += f"[{part}]"
            inside = inside[part]
        elif isinstance(inside, dict) and part in inside:
            rest += f".{part}"
            inside = inside[part]
    return path, node, rest


def _message(table: Table, error: ErrorDetails, subject: ValidationSubject) -> str:
    kind = error["type"]
    loc = error["loc"]
    if kind == "extra_forbidden":
        return _unknown_key(table, loc, subject)
    path, node, rest = _locate(table, loc)
    key = ".".join((*subject.path, *path)) + rest
    origin = node.origin
    if kind == "missing":
        name = f"{key}.{loc[-1]}" if key else str(loc[-1])
        by = f"; {subject.owner} needs it" if subject.owner else "; it has no default"
        return f"{location(subject.origin if subject.origin and not path else origin, name)}: is missing{by}"
    if loc[-1:] == ("[key]",):
        return f"{location(origin, key)}: a worker's name may hold only a-z, 0-9 and _"
    if not path:
        origin = subject.origin or origin
        key = key or "the configuration"
    return f"{location(origin, key)}: {_problem(error, node, key)}"


def _unknown_key(table: Table, loc: tuple[int | str, ...], subject: ValidationSubject) -> str:
    path, node, rest = _locate(table, loc)
    key = ".".join((*subject.path, *path)) + rest
    known = subject.shape.at(loc[:-1] if rest else path[:-1])
    hint = suggestion(str(loc[-1]), known.fields) if known is not None else ""
    of = f" of {subject.owner}" if subject.owner else ""
    return f"{location(node.origin, key)}: unknown key{of}{hint}"


def _problem(error: ErrorDetails, node: Node, key: str) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {_shown(node, error)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        bound = f"{bound:g}" if isinstance(bound, float) else bound
        return f"must be {words} {bound}, got {_shown(node, error)}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}, got {_shown(node, error)}"
    if kind.endswith(("too_short", "too_long")):
        number = f"{context['min_length']} or more" if "min_length" in context else f"at most {context['max_length']}"
        counted = "characters" if isinstance(error["input"], str) else "entries"
        return "must not be empty" if number == "1 or more" else f"must have {number} {counted}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, got {_shown(node, error)}"
    # The message may be a plugin's own, and may repeat or transform any value it was given, unless it is said not to.
    if not isinstance(context.get("error"), SettingsMismatch) and any(leaf.hidden for leaf in _leaves(node)):
        return "is not accepted; the reason is not shown because it may hold a secret"
    return error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children.values():
            yield from _leaves(child)


def _shown(node: Node, error: ErrorDetails) -> str:
    if isinstance(node, Leaf) and node.hidden:
        return "***"
    value = error["input"]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
