"""The JSON Schema of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_runtime.settings import config_schema
from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    requests: int = 1


class Mocker(PluginConfig):
    speedup_ratio: float = Field(1.0, gt=0, description="How much faster.")
    limits: Limits = Limits()
    required: Literal["a"]


class Nats(PluginConfig):
    servers: list[str]
    limits: Limits = Limits()


ANY = "additionalProperties"


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for child in schema.values():
            yield from nodes(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from nodes(child)


def follow(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    node = schema
    for key in path:
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        if key == "*":
            node = next(iter(node["patternProperties"].values()), {}) if "patternProperties" in node else node[ANY]
        else:
            node = node["properties"][key]
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
    return node


def test_the_schema_is_a_closed_object_of_the_2020_12_dialect() -> None:
    schema = config_schema({})

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert {"frontend", "workers", "profiles", "client"} <= set(schema["properties"])
    assert list(schema["properties"]["workers"]["patternProperties"]) == ["^[a-z0-9_]+$"]
    assert schema["properties"]["workers"]["additionalProperties"] is False


def test_every_reference_leads_somewhere() -> None:
    schema = config_schema({"workers.*.engine": Mocker, "transport": Nats, "events": Nats})

    references = [node["$ref"] for node in nodes(schema) if isinstance(node.get("$ref"), str)]

    assert references
    for reference in references:
        assert reference.removeprefix("#/$defs/") in schema["$defs"], reference


def test_plugin_models_are_merged_into_their_sections() -> None:
    schema = config_schema({"workers.*.engine": Mocker, "transport": Nats})

    engine = follow(schema, "workers", "*", "engine")
    transport = follow(schema, "transport")
    assert engine["properties"]["speedup_ratio"]["description"] == "How much faster."
    assert engine["required"] == ["use", "required"]
    assert engine["additionalProperties"] is False
    assert follow(schema, "workers", "*", "engine", "limits")["properties"].keys() == {"requests"}
    assert set(transport["properties"]) == {"use", "servers", "limits"}
    assert transport["required"] == ["servers"]
    assert follow(schema, "router")["additionalProperties"] is True


def test_common_keys_stay_beside_the_plugins() -> None:
    schema = config_schema({"frontend": Nats})

    assert set(follow(schema, "frontend")["properties"]) == {
        "use",
        "apis",
        "host",
        "port",
        "processes",
        "tls",
        "response_store",
        "servers",
        "limits",
    }


def test_profiles_know_the_same_keys_and_require_none() -> None:
    schema = config_schema({"workers.*.engine": Mocker})

    worker = follow(schema, "profiles", "*", "workers", "*")
    engine = follow(schema, "profiles", "*", "workers", "*", "engine")
    assert "required" not in worker
    assert "required" not in engine
    assert "required" in engine["properties"], "a property of that name is no keyword"
    assert "profiles" not in follow(schema, "profiles", "*")["properties"]


def test_config_schema_calls_are_independent() -> None:
    config_schema({"workers.*.engine": Mocker})

    assert "speedup_ratio" not in follow(config_schema({}), "workers", "*", "engine")["properties"]


@pytest.mark.parametrize("path", ["client", "nothing", "workers.*"])
def test_a_path_that_is_no_section_is_a_mistake_of_the_caller(path: str) -> None:
    with pytest.raises(KeyError):
        config_schema({path: Mocker})
