"""Errors that name a plugin which is not installed, and its remedy."""

from __future__ import annotations

import pytest
from dynamo_core.errors import PluginError
from dynamo_core.plugins import loader as loading
from dynamo_core.plugins.loader import PluginLoader


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("engine", "echo", "ours are called dynamo-plugin-engine-NAME"),
        ("response_store", "memory", "ours is dynamo-plugin-frontend-responses"),
        ("response_store", "sqlite", "ours are called dynamo-plugin-response-store-NAME"),
        ("tool_parser", "hermes", "ours is dynamo-plugin-parsers-standard"),
    ],
)
def test_the_distribution_that_has_the_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, remedy: str
) -> None:
    monkeypatch.setattr(loading, "find_plugins", list)

    with pytest.raises(PluginError) as refused:
        PluginLoader().find(kind, name)

    assert str(refused.value).endswith(f"install the distribution that offers it ({remedy})")
