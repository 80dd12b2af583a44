"""The JSON Schema of the configuration, for editors and for people."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from dynamo_core.contracts.config import PluginConfig

from dynamo_runtime.settings.known_keys import shape_of
from dynamo_runtime.settings.model import Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(plugin_configs: Mapping[str, type[PluginConfig]]) -> dict[str, Any]:
    """Return the schema of the whole file, draft 2020-12.

    Args:
        plugin_configs: the model of the plugin in each section, by the section's path: ``frontend``, ``router``,
            ``workers.*.engine``, ``admission.*.USE`` in a list, … A section without one accepts any keys beside
            its own.

    Raises:
        KeyError: a path names no plugin section.
    """
    schema = Settings.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.pop("$defs")
    # The names that a pattern admits are all there are.
    schema["properties"]["workers"]["additionalProperties"] = False
    _merge_list_forms(schema["properties"], definitions)
    for section, config_cls in plugin_configs.items():
        _add_plugin(schema, definitions, section, config_cls)
    frontend = _follow(schema["properties"]["frontend"], definitions)
    keys = ("properties", "additionalProperties")
    entry = {key: copy.deepcopy(frontend[key]) for key in keys if key in frontend}
    frontend.update(type=["object", "array"], items={"type": "object", "required": ["use"], **entry})
    partial = {f"Partial.{name}": _without_required(definition) for name, definition in definitions.items()}
    profile = _without_required({key: schema[key] for key in ("properties", "additionalProperties", "type")})
    schema["description"] = "The configuration of dynamo-core: one file, with profiles that may be laid over it."
    schema["properties"]["profiles"] = {
        "type": "object",
        "description": "Changes to lay over the file, by name; one may be picked at the start.",
        "additionalProperties": {"$ref": "#/$defs/Profile"},
    }
    return {"$schema": DIALECT, **schema, "$defs": {**definitions, **partial, "Profile": profile}}


def _add_plugin(
    schema: dict[str, Any], definitions: dict[str, Any], section: str, config_cls: type[PluginConfig]
) -> None:
    key, _, use = section.partition(".*.")
    path = section.split(".")
    listed = shape_of(Settings).fields.get(key)
    entry = listed.entry if listed is not None else None
    shape = shape_of(Settings).at(path) if entry is None or not use else entry
    if shape is None or not shape.is_section:
        raise KeyError(section)
    prefix = re.sub(r"[^\w.-]", "_", section.replace("*.", ""))
    plugin = config_cls.model_json_schema(by_alias=True, ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in plugin.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = definition

    # Every section has a model, and so a definition, of its own: changing it changes nothing else.
    if shape is entry:
        items = _follow(schema["properties"][key], definitions)["items"]
        target = definitions[prefix] = _entry_of(use, prefix, _follow(items, definitions))
    else:
        target = schema
        for key in path:
            below = next(iter(target["patternProperties"].values())) if key == "*" else target["properties"][key]
            target = _follow(below, definitions)
    target["properties"] = {**plugin.get("properties", {}), **target["properties"]}
    required = [*target.get("required", ()), *plugin.get("required", ())]
    if required:
        target["required"] = required
    target["additionalProperties"] = plugin.get("additionalProperties", False)


def _merge_list_forms(properties: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Merge both forms of a section that may be a list: keywords of objects and of arrays do not meet."""
    for key, field in properties.items():
        if "oneOf" in field:
            (mapping,) = (option for option in field["oneOf"] if "$ref" in option)
            (entries,) = (option for option in field["oneOf"] if "items" in option)
            properties[key] = mapping
            _follow(mapping, definitions).update(type=["object", "array"], items=entries["items"])


def _entry_of(use: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the definition of an entry, for those that pick this plugin; the one for all refers to it."""
    target = {key: copy.deepcopy(value) for key, value in entry.items() if key != "allOf"}
    condition = {"properties": {"use": {"const": use}}, "required": ["use"]}
    entry.setdefault("allOf", []).append({"if": condition, "then": {"$ref": f"#/$defs/{name}"}})
    return target


def _follow(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    # Of a section that may be null, the other choice.
    field = next((choice for choice in field.get("anyOf", ()) if "$ref" in choice), field)
    found: dict[str, Any] = definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field
    return found


def _without_required(node: Any) -> Any:
    """Return the schema of a part of the configuration: the same keys, but none of them needed."""
    if isinstance(node, dict):
        # A property may itself be called `required`; its schema is a mapping, the keyword's value a list.
        kept = {key: value for key, value in node.items() if key != "required" or not isinstance(value, list)}
        # Without its condition what holds for one plugin would hold for every entry.
        return {
            key: value if key == "if" else _partial_ref(key, _without_required(value)) for key, value in kept.items()
        }
    if isinstance(node, list):
        return [_without_required(child) for child in node]
    return copy.deepcopy(node)


def _partial_ref(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str):
        return value.replace("#/$defs/", "#/$defs/Partial.")
    return value
