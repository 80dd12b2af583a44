"""The section `frontend` as a list: an entry per API. All share one listener, so that their keys are one section's."""

from __future__ import annotations

from dataclasses import replace

from dynamo_core.errors import ConfigError

from dynamo_runtime.settings.entries import is_entry_list
from dynamo_runtime.settings.tree import Leaf, Node, Table, from_plain, location, to_plain

_KEY = "frontend"


def join_frontends(layer: Table) -> Table:
    """Return a layer whose list of frontends is one section, with the names of the APIs in `apis`.

    Raises:
        ConfigError: an entry picks no API, or two entries have another value for the same key.
    """
    node = layer.children.get(_KEY)
    if not isinstance(node, Leaf) or not is_entry_list(node):
        return layer
    apis: list[Leaf] = []
    children: dict[str, Node] = {}
    for index, item in enumerate(node.items or [from_plain(value, node.origin) for value in node.value]):
        where = location(item.origin, f"{_KEY}[{index}]")
        use = item.children.get("use") if isinstance(item, Table) else None
        if not isinstance(item, Table) or not isinstance(use, Leaf) or "apis" in item.children:
            raise ConfigError(f"{where}: expected an API such as {{use: openai}}")
        if any(use.value == known.value for known in apis):
            raise ConfigError(f"{where}: {use.value!r} is listed twice")
        apis.append(use)
        children.setdefault("use", use)
        for key, child in item.children.items():
            if key == "use":
                continue
            known = children.setdefault(key, child)
            if known is not child and to_plain(known) != to_plain(child):
                raise ConfigError(
                    f"{location(child.origin, f'{_KEY}[{index}].{key}')}: another entry has another value, at "
                    f"{known.origin}: all APIs share one listener and its settings, so write it once"
                )
    if not apis:
        raise ConfigError(f"{location(node.origin, _KEY)}: name at least one API, such as {{use: openai}}")
    children["apis"] = Leaf([use.value for use in apis], node.origin, items=tuple(apis))
    return replace(layer, children={**layer.children, _KEY: Table(node.origin, children)})
