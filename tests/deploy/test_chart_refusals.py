"""The chart checks its values before anything reaches a cluster, and says which one is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "dynamo"

GOOD: dict[str, Any] = {
    "config": {"transport": {"use": "nats"}},
    "workers": {"mock": {"config": {"model": {"name": "m"}, "engine": {"use": "mocker"}}}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the good values with another one at a path."""
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    inner = values
    for key in parents:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return values


Render = Callable[..., dict[str, str]]
Refusal = Callable[[dict[str, Any]], str]


def test_few_values_are_enough(render: Render) -> None:
    assert "dynamo-worker-mock" in render(GOOD)["dynamo/templates/workers.yaml"]


def test_the_chart_without_values_names_the_required_ones(refusal: Refusal) -> None:
    text = refusal({})

    assert "transport" in text
    assert "/workers" in text


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("frontend.replica", 3, "replica"),
        ("frontend.replicas", -1, "/frontend/replicas"),
        ("config.transport.use", "inproc", "/config/transport/use"),
        ("config.discovery.use", "memory", "/config/discovery/use"),
        ("config.discovery.use", "file", "/config/discovery/use"),
        ("config.admin.port", None, "/config/admin/port"),
        ("config.admin.port", 0, "/config/admin/port"),
        ("config.workers", {"mock": {}}, "/config/workers"),
        ("config.profiles", {"a": {}}, "/config/profiles"),
        ("workers.with-dash", {"config": {"model": {"name": "m"}, "engine": {"use": "e"}}}, "with-dash"),
        ("workers.a_name_that_is_much_too_long", GOOD["workers"]["mock"], "a_name_that_is_much_too_long"),
        ("workers.mock.config.replicas", 2, "/workers/mock/config/replicas"),
        ("workers.mock.config.model", {}, "/workers/mock/config/model"),
        ("workers.mock.config.system_port", 0, "/workers/mock/config/system_port"),
        ("workers.mock.podDisruptionBudget", {"minAvailable": 1}, "minAvailable"),
        ("workers.mock.autoscaling", {"enabled": True}, "dynamo-worker-mock: autoscaling.metrics"),
        ("secrets.A", {"secret": "s"}, "/secrets/A"),
        ("secrets.A-B", {"secret": "s", "key": "k"}, "A-B"),
        ("image.pullPolicy", "Sometimes", "/image/pullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(refusal: Refusal, path: str, value: Any, named: str) -> None:
    assert named in refusal(changed(path, value))


def test_names_stay_within_the_limit_for_any_release_name(render: Render) -> None:
    worker = "w" * 20
    files = render(changed(f"workers.{worker}", GOOD["workers"]["mock"]), release="r" * 53)

    names = [
        found["metadata"]["name"]
        for name, text in files.items()
        if name.endswith(".yaml")
        for found in yaml.safe_load_all(text)
        if found is not None
    ]
    assert any(name.endswith(worker) for name in names)
    assert max(map(len, names)) <= 63


def test_every_value_has_its_place_in_the_schema_and_the_page(library: Callable[[str], Any]) -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    library("jsonschema").Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    page = (CHART / "README.md").read_text()
    rows = set(re.findall(r"^\| `([^`]+)`", page, re.M))

    assert values.keys() == schema["properties"].keys() - {"global"}
    # Keys of the first level, and for the groups whose keys are fixed those of the second.
    for key, value in values.items():
        group = schema["properties"][key]
        if key in ("config", "secrets", "workers", "workerDefaults", "pod", "frontend") or not isinstance(value, dict):
            assert key in rows, key
        else:
            assert {f"{key}.{name}" for name in group["properties"]} <= rows, key
    parts = schema["properties"]["workerDefaults"]["properties"]
    assert parts.keys() <= rows
