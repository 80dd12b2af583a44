"""The sections of docs/reference/configuration.md: settings, live keys, flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dynamo_plugin_admission_fair_queue.config import FairQueueConfig, TenantSettings
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig, RuleSettings
from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_runtime.settings import FLAGS, config_schema
from dynamo_runtime.settings.model import LIVE_KEYS
from pydantic import BaseModel

from scripts.pages.tables import code, table


def setting_rows() -> list[tuple[str, str, str, str]]:
    """Return a row per key from the schema: key, type, default, meaning."""
    schema = config_schema({})

    def walk(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
        for key, field in node["properties"].items():
            target = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
            if "properties" in target:
                yield from walk(target, (*path, key))
            elif "patternProperties" in target:
                (below,) = target["patternProperties"].values()
                yield from walk(schema["$defs"][below["$ref"].rpartition("/")[2]], (*path, key, "NAME"))
            elif key != "profiles":
                default = code(json.dumps(field["default"])) if "default" in field else "required"
                yield code(".".join((*path, key))), type_of(field), default, field["description"]

    return list(walk(schema, ()))


def type_of(field: dict[str, Any]) -> str:
    """Return the type of a field in words, from its schema."""
    if "anyOf" in field:
        *others, last = (type_of(option) for option in field["anyOf"])
        first = ", ".join(others)
        return f"{first}{',' if ',' in first else ''} or {last}"
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return "one of " + ", ".join(code(value) for value in field["enum"])
    if field["type"] == "array":
        items = type_of(field["items"])
        many = {"string": "list of strings", "mapping": "list of mappings"}
        return many.get(items) or f"list, each {items}"
    for bound, words in (("minimum", "at least"), ("exclusiveMinimum", "more than")):
        if bound in field:
            values = f"{field[bound]} to {field['maximum']}" if "maximum" in field else f"{words} {field[bound]}"
            return f"{field['type']}, {values}"
    return str(field["type"])


def _settings() -> str:
    return table(("Key", "Type", "Default", "Meaning"), setting_rows())


def _live_keys() -> str:
    plugins = (("fair-queue", FairQueueConfig), ("kv", KvConfig), ("rate-limit", RateLimitConfig))
    rows = [("the framework", sorted(LIVE_KEYS)), *((code(name), sorted(config.LIVE)) for name, config in plugins)]
    return table(("Of", "Live keys"), ((owner, ", ".join(map(code, keys))) for owner, keys in rows))


def _flags() -> str:
    return table(
        ("Flag", "Variable", "Key", "Meaning"),
        (
            (code(flag.flag) if flag.flag else "–", code(flag.env) if flag.env else "–", code(flag.key), flag.help)
            for flag in FLAGS
        ),
    )


def _plugin(config: type[BaseModel], start: str = "") -> str:
    """Return the table of a plugin's own keys that begin so."""
    schema = config.model_json_schema(by_alias=True)

    def row(name: str, field: dict[str, Any]) -> tuple[str, str, str]:
        default = json.dumps(field["default"]) if "default" in field else "–"
        return code(name), code(default), field["description"]

    rows = (row(name, field) for name, field in schema["properties"].items() if name.startswith(start))
    return table(("Key", "Default", "Meaning"), rows)


def _rule() -> str:
    schema = RuleSettings.model_json_schema()["properties"]
    own = [name for name in schema if name not in RateLimitConfig.model_fields]
    return table(("Key", "Meaning"), ((code(name), schema[name]["description"]) for name in own))


SECTIONS: dict[str, Callable[[], str]] = {
    "settings": _settings,
    "live-keys": _live_keys,
    "flags": _flags,
    "settings-fair-queue": partial(_plugin, FairQueueConfig),
    "settings-tenant": partial(_plugin, TenantSettings),
    "settings-rate-limit": partial(_plugin, RateLimitConfig),
    "settings-rule": _rule,
    "settings-response-store": partial(_plugin, ResponsesConfig, "response_store_"),
}
