"""Phase two: the keys of a section are checked by the model of its plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import LoadedSettings, load_settings
from pydantic import BaseModel, ConfigDict, Field

ConfigFile = Callable[..., Path]


class Tls(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cert: str
    verify: bool = True


class Mocker(PluginConfig):
    speedup_ratio: float = Field(1.0, gt=0)
    label: str = ""
    tls: Tls | None = None
    ports: list[int] = Field(default_factory=list)


class Needy(PluginConfig):
    servers: list[str]


def mocker(config_file: ConfigFile, keys: str) -> LoadedSettings:
    path = config_file(f"workers:\n  mock:\n    model: {{name: m}}\n    engine:\n      use: mocker\n      {keys}\n")
    return load_settings(path, env={})


def test_a_plugin_gets_its_own_keys_and_no_common_ones(config_file: ConfigFile) -> None:
    class Frontend(PluginConfig):
        banner: str = "none"

    path = config_file("frontend: {port: 9000, banner: hello}")

    loaded = load_settings(path, env={"DYN_FRONTEND__BANNER": "12"})

    assert loaded.plugin_config("frontend", Frontend) == Frontend(banner="12")
    assert loaded.settings.frontend.options == {"banner": 12}


def test_plugin_keys_can_come_from_the_environment_and_set() -> None:
    loaded = load_settings(
        env={"DYN_WORKERS__MOCK__ENGINE__SPEEDUP_RATIO": "2.5"},
        sets=["workers.mock.engine.tls.cert=a", "workers.mock.engine.ports=[1, 2]"],
    )

    config = loaded.plugin_config("workers.mock.engine", Mocker)

    assert config == Mocker(speedup_ratio=2.5, tls=Tls(cert="a"), ports=[1, 2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "speedup_ratoi: 1",
            "6: workers.mock.engine.speedup_ratoi: unknown key of engine 'mocker'; did you mean 'speedup_ratio'?",
        ),
        ("speedup_ratio: fast", "6: workers.mock.engine.speedup_ratio: expected a number, got 'fast'"),
        ("speedup_ratio: 0", "6: workers.mock.engine.speedup_ratio: must be more than 0, got 0"),
        (
            "tls: {cert: a, verfy: no}",
            "6: workers.mock.engine.tls.verfy: unknown key of engine 'mocker'; did you mean 'verify'?",
        ),
        ("tls: {}", "6: workers.mock.engine.tls.cert: is missing; engine 'mocker' needs it"),
        ("ports: [1, x]", "6: workers.mock.engine.ports[1]: expected an integer, got 'x'"),
    ],
)
def test_a_mistake_in_a_plugins_key_names_line_key_and_plugin(config_file: ConfigFile, keys: str, message: str) -> None:
    loaded = mocker(config_file, keys)

    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("workers.mock.engine", Mocker)

    assert str(caught.value) == f"config.yaml:{message}"


def test_a_missing_key_error_names_the_origin_of_the_plugin() -> None:
    loaded = load_settings(env={}, flags={"--request-plane": "nats"})

    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("transport", Needy)

    assert str(caught.value) == "flag --request-plane: transport.servers: is missing; transport 'nats' needs it"


def test_a_missing_key_error_names_the_profile_that_picked_the_plugin(config_file: ConfigFile) -> None:
    path = config_file("transport: {use: inproc}\nprofiles:\n  far:\n    transport:\n      use: nats\n")
    loaded = load_settings(path, profile="far", env={})

    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("transport", Needy)

    assert str(caught.value) == "profile far (config.yaml:4): transport.servers: is missing; transport 'nats' needs it"


def test_a_plugin_without_settings_refuses_every_key() -> None:
    loaded = load_settings(env={"DYN_ROUTER__TEMPERATURE": "1"})

    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("router", PluginConfig)

    assert str(caught.value) == (
        "environment DYN_ROUTER__TEMPERATURE: router.temperature: unknown key of router 'round-robin'; known: use"
    )


@pytest.mark.parametrize("path", ["client", "workers.mock", "workers.none.engine", "nothing", "frontend.use"])
def test_asking_for_something_that_is_no_section_is_a_mistake_of_the_caller(path: str) -> None:
    loaded = load_settings(env={})

    with pytest.raises(KeyError):
        loaded.plugin_config(path, PluginConfig)
