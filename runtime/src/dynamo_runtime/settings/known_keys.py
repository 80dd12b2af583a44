"""The known keys of a pydantic model as a tree: for merging, defaults, and suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from dynamo_core.contracts.config import NESTED
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

#: The default of a key that must be given.
REQUIRED = PydanticUndefined


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys below one place of the configuration."""

    #: Whether a table is expected here, rather than a value.
    is_table: bool = False
    fields: Mapping[str, Shape] = field(default_factory=dict)
    #: What stands below names that the user chooses.
    each: Shape | None = None
    #: What each entry of a list holds, where a list of tables is expected.
    item: Shape | None = None
    #: A section of a plugin: keys beside `fields` are the plugin's.
    is_section: bool = False
    #: What each entry holds, where a list of plugin sections may stand. Such entries are known by name.
    entry: Shape | None = None
    default: Any = REQUIRED

    def child(self, key: str) -> Shape | None:
        """Return the shape below a key; None for unknown keys and for keys of plugins."""
        return self.fields.get(key) or self.each or (_NESTED_SECTION if self.is_section and key == NESTED else None)

    def at(self, path: Iterable[str | int]) -> Shape | None:
        """Return the shape at a path, in which a number stands for an entry of a list; or None."""
        shape: Shape | None = self
        for key in path:
            if shape is not None:
                shape = shape.item if isinstance(key, int) else shape.child(key) or shape.entry
        return shape


_NESTED_SECTION = Shape(is_table=True, is_section=True, fields={"use": Shape()})


@cache
def shape_of(model: type[BaseModel]) -> Shape:
    """Return the keys of a model, as they are written in a file."""
    fields = {info.alias or name: _field_shape(info) for name, info in model.model_fields.items()}
    return Shape(is_table=True, fields=fields, is_section=model.model_config.get("extra") == "allow")


def _field_shape(info: FieldInfo) -> Shape:
    below = _table_shape(info.annotation)
    item = _item_shape(info.annotation)
    if item is not None and item.is_section:
        return replace(below or Shape(is_table=True), entry=item)
    if below is not None:
        return below
    default = info.get_default(call_default_factory=True, validated_data={})
    return Shape(item=item, default=list(default) if isinstance(default, tuple) else default)


def _item_shape(annotation: Any) -> Shape | None:
    """Return what the entries of a list hold, or of the list that is one of several choices."""
    origin = get_origin(annotation)
    if origin in (tuple, list):
        return _table_shape(get_args(annotation)[0])
    choices = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
    items = (_item_shape(choice) for choice in choices if origin in (Annotated, Union, UnionType))
    return next((item for item in items if item is not None), None)


def _table_shape(annotation: Any) -> Shape | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return shape_of(annotation)
    origin = get_origin(annotation)
    if origin is dict:
        below = _table_shape(get_args(annotation)[1])
        return Shape(is_table=True, each=below) if below is not None else None
    if origin is Annotated:
        return _table_shape(get_args(annotation)[0])
    if origin in (Union, UnionType):
        tables = [shape for arg in get_args(annotation) if (shape := _table_shape(arg)) is not None]
        return tables[0] if len(tables) == 1 else None
    return None


def suggestion(name: str, known: Iterable[str], *, quote: str = "'") -> str:
    """Return ``; did you mean 'x'?`` if something known is close, else the known names, else nothing."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {quote}{close[0]}{quote}?"
    if names and len(names) <= 12:
        return f"; known: {', '.join(names)}"
    return ""
