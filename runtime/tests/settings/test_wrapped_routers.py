"""A router that wraps another one: the section under `then`, in all layers, by the inner plugin's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from dynamo_core.contracts.config import PluginConfig, PluginRef
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import LoadedSettings, config_schema, load_settings, view_settings
from pydantic import Field

ConfigFile = Callable[..., Path]

WRAPPED = """
router:
  use: sticky
  then:
    use: kv
    weight: 2
profiles:
  turns:
    router: {then: {use: turns}}
"""


class Sticky(PluginConfig):
    then: PluginRef | None = None


class Kv(PluginConfig):
    weight: float = Field(default=1.0, gt=0)
    token: str = ""


def inner(loaded: LoadedSettings) -> Kv:
    return loaded.plugin_config("router.then", Kv)


def test_either_plugin_gets_its_own_keys(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(WRAPPED), env={})

    assert loaded.plugin_config("router", Sticky) == Sticky(then=PluginRef(use="kv"))
    assert inner(loaded).weight == 2
    assert loaded.origin("router.then.weight") == "config.yaml:5"


def test_the_keys_of_the_inner_plugin_are_not_kept_in_the_settings_of_the_outer(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(WRAPPED), env={}, sets=["router.then.token=geheim"])

    assert "geheim" not in repr(loaded.plugin_config("router", Sticky))
    assert loaded.dump()["router"]["then"] == {"use": "kv", "weight": 2, "token": "***"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["router.then.wieght=3"],
            "--set router.then.wieght=3: unknown key of router 'kv'; did you mean 'weight'?",
        ),
        (["router.then.weight=0"], "--set router.then.weight=0: must be more than 0, got 0"),
        (["router.then=kv"], "--set router.then=kv: expected a mapping of settings such as {use: …}"),
    ],
    ids=["unknown", "out of range", "no section"],
)
def test_errors_of_the_inner_plugin_name_its_key(config_file: ConfigFile, sets: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        inner(load_settings(config_file(WRAPPED), env={}, sets=sets))

    assert str(raised.value).startswith(message)


def test_a_section_without_use_is_refused(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file("router: {use: sticky, then: {weight: 2}}"), env={})

    with pytest.raises(ConfigError, match=r"^config\.yaml:1: router\.then\.use: is missing; router 'sticky' needs it$"):
        loaded.plugin_config("router", Sticky)


def test_a_plugin_that_wraps_none_knows_no_then(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(WRAPPED), env={}, sets=["router.use=kv", "router.then.use=kv"])

    with pytest.raises(ConfigError, match=r"router\.then.*unknown key of router 'kv'"):
        loaded.plugin_config("router", Kv)


def test_another_inner_plugin_drops_the_keys_of_the_one_before(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(WRAPPED), profile="turns", env={})

    assert loaded.settings.router.options == {"then": {"use": "turns"}}
    assert load_settings(config_file(WRAPPED), env={}, sets=["router.use=kv"]).settings.router.options == {}


def test_the_environment_and_set_reach_the_inner_plugin(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(WRAPPED), env={"DYN_ROUTER__THEN__WEIGHT": "3"}, sets=["router.then.token=t"])

    assert inner(loaded) == Kv(weight=3, token="t")
    assert loaded.origin("router.then.weight") == "environment DYN_ROUTER__THEN__WEIGHT"


@pytest.mark.parametrize(
    ("flags", "env", "options"),
    [
        ({"--router-mode": "turns"}, {}, {"then": {"use": "turns"}}),
        ({}, {"DYN_ROUTER_MODE": "turns"}, {"then": {"use": "turns"}}),
        ({"--router-mode": "sticky"}, {}, {"then": {"use": "kv", "weight": 2}}),
        ({}, {"DYN_ROUTER_MODE": "sticky"}, {"then": {"use": "kv", "weight": 2}}),
        ({"--router-temperature": 0.5}, {}, {"then": {"use": "kv", "weight": 2, "temperature": 0.5}}),
    ],
    ids=["a flag", "a variable", "the flag names the outer", "the variable names the outer", "a key of the router"],
)
def test_flags_of_the_router_mean_the_innermost(
    config_file: ConfigFile, flags: dict[str, Any], env: dict[str, str], options: dict[str, Any]
) -> None:
    loaded = load_settings(config_file(WRAPPED), env=env, flags=flags)

    assert loaded.settings.router.use == "sticky"
    assert loaded.settings.router.options == options


def test_a_secret_that_is_missing_is_only_shown_as_missing(config_file: ConfigFile) -> None:
    path = config_file("router: {use: sticky, then: {use: kv, token: '${env:NONE}'}}")

    rows = {key: value for key, value, _ in view_settings(path, env={}).rows()}

    assert rows["router.then.token"] == "*** (environment variable 'NONE' is not set)"


def test_the_schema_has_the_keys_of_both() -> None:
    schema = config_schema({"router": Sticky, "router.then": Kv})

    def fits(router: dict[str, Any]) -> bool:
        return jsonschema_rs.is_valid(schema, {"router": router})

    assert fits({"use": "sticky", "then": {"use": "kv", "weight": 2}})
    assert fits({"use": "sticky", "then": None})
    assert not fits({"use": "sticky", "then": {"use": "kv", "wieght": 2}})
    assert not fits({"use": "sticky", "then": {"weight": 2}})
    assert not fits({"use": "sticky", "than": {"use": "kv"}})
