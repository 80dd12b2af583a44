"""Secrets reach the plugin, and nothing else."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig, SettingsMismatch
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings, view_settings
from pydantic import Field, SecretStr, field_validator, model_validator

ConfigFile = Callable[..., Path]
SECRET = "hunter2"


class Nats(PluginConfig):
    servers: list[str] = Field(default_factory=list)
    port: int = 1
    dsn: str = ""
    level: int = Field(0, le=5)
    key: SecretStr | None = Field(None, min_length=8, max_length=16)
    user: str = Field("nats", min_length=2)

    @field_validator("dsn")
    @classmethod
    def _no_spaces(cls, value: str) -> str:
        if " " in value:
            raise ValueError(f"{value.upper()} has a space")
        return value

    @model_validator(mode="after")
    def _together(self) -> Nats:
        if self.port == 0:
            raise ValueError(f"{self!r} does not fit")
        if self.level == 5:
            raise SettingsMismatch("`level` and `dsn` do not go together")
        return self


def test_references_are_filled_in_and_never_shown(config_file: ConfigFile) -> None:
    Path(config_file("").parent, "key.txt").write_text("from-file\n", encoding="utf-8")
    path = config_file(
        """
        transport:
          use: nats
          servers: ["nats://plain:4222", "nats://u:${env:PW}@h:4222"]
          port: ${env:PORT}
          key: ${file:key.txt}
          dsn: $${env:PW}
        """
    )

    loaded = load_settings(path, env={"PW": SECRET, "PORT": "4222"})

    config = loaded.plugin_config("transport", Nats)
    assert config.servers == ["nats://plain:4222", f"nats://u:{SECRET}@h:4222"]
    assert config.port == 4222
    assert config.key is not None
    assert config.key.get_secret_value() == "from-file"
    assert config.dsn == "${env:PW}"
    assert loaded.dump()["transport"] == {
        "use": "nats",
        "servers": ["nats://plain:4222", "***"],
        "port": "***",
        "key": "***",
        "dsn": "${env:PW}",
    }
    assert loaded.dump(redact=False)["transport"]["port"] == "4222"
    for shown in (repr(loaded.rows()), repr(loaded.settings), str(loaded.settings.transport)):
        assert SECRET not in shown
        assert "from-file" not in shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("secret", "x", "***"),
        ("secret", None, None),
        ("password", 1234, "***"),
        ("hmac-secret", "x", "***"),
        ("api_key", "x", "***"),
        ("apikeys", ["x", "y"], "***"),
        ("api_keys", {"alice": "x"}, {"alice": "***"}),
        ("auth_token", "x", "***"),
        ("tokens", ["x"], ["***"]),
        ("keys", [{"id": "a", "hash": "sha256:" + "0f" * 32}], [{"id": "a", "hash": "***"}]),
        ("max_tokens", 5, 5),
        ("tokenizer", "x", "x"),
        ("token_capacity", 5, 5),
        ("url", "redis://me:pw@host:1", "redis://***@host:1"),
        ("url", "redis://host:1", "redis://host:1"),
    ],
)
def test_values_of_secret_keys_are_hidden(config_file: ConfigFile, key: str, value: Any, shown: Any) -> None:
    import json

    path = config_file(json.dumps({"transport": {"use": "x", key: value}}))

    assert load_settings(path, env={}).dump()["transport"][key] == shown


def test_a_worker_may_be_called_token(config_file: ConfigFile) -> None:
    path = config_file("workers: {token: {model: {name: m}, engine: {use: mocker}, replicas: 2}}")

    assert load_settings(path, env={}).dump()["workers"]["token"]["replicas"] == 2


@pytest.mark.parametrize(
    "argument",
    [
        f"transport.secret={SECRET}",
        f"transport={{secret: {SECRET}}}",
        f"transport.servers=[nats://u:{SECRET}@h]",
        f"transport.url=nats://u:{SECRET}@h",
    ],
)
def test_the_origin_of_a_secret_given_with_set_does_not_show_it(argument: str) -> None:
    loaded = load_settings(env={}, sets=[argument])

    assert SECRET in repr(loaded.dump(redact=False))
    assert SECRET not in repr(loaded.rows())
    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("transport", PluginConfig)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("port: '${env:PW}'", "config.yaml:3: transport.port: expected an integer, got ***"),
        ("servers: '${env:PW}'", "config.yaml:3: transport.servers: expected a list, got ***"),
        (
            "dsn: 'a ${env:PW}'",
            "config.yaml:3: transport.dsn: is not accepted; the reason is not shown because it may hold a secret",
        ),
        (
            "{dsn: '${env:PW}', port: 0}",
            "config.yaml:1: transport: is not accepted; the reason is not shown because it may hold a secret",
        ),
        ("{dsn: '${env:PW}', level: 5}", "config.yaml:1: transport: `level` and `dsn` do not go together"),
        ("dsn: a b", "config.yaml:3: transport.dsn: A B has a space"),
        ("key: '${env:PW}'", "config.yaml:3: transport.key: must have 8 or more characters"),
        (f"key: {'x' * 17}", "config.yaml:3: transport.key: must have at most 16 characters"),
        ("user: n", "config.yaml:3: transport.user: must have 2 or more characters"),
    ],
)
def test_errors_do_not_show_secrets(config_file: ConfigFile, section: str, message: str) -> None:
    body = section.strip("{}") if section.startswith("{") else section
    lines = "\n  ".join(body.split(", "))
    path = config_file(f"transport:\n  use: nats\n  {lines}\n")
    loaded = load_settings(path, env={"PW": SECRET})

    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("transport", Nats)

    assert str(caught.value) == message
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert SECRET.upper() not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("password: *hunter2", "a value begins with '*' but names no anchor; put it in quotes"),
        ("password: !hunter2 x", "a value begins with '!' but names no known tag; put it in quotes"),
    ],
)
def test_a_password_that_is_no_valid_yaml_is_not_repeated(config_file: ConfigFile, text: str, message: str) -> None:
    path = config_file(f"transport:\n  {text}")

    with pytest.raises(ConfigError) as caught:
        load_settings(path, env={})

    assert str(caught.value) == f"config.yaml:2: is not valid YAML: {message}"


def test_a_dangling_reference_is_reported_with_its_place(config_file: ConfigFile) -> None:
    variable = config_file("transport: {secret: '${env:NOPE}'}")
    file = config_file("transport: {secret: '${file:nope.txt}'}", "file.yaml")

    with pytest.raises(ConfigError, match=r"^config.yaml:1: transport.secret: environment variable 'NOPE' is not set$"):
        load_settings(variable, env={})
    with pytest.raises(ConfigError, match=r"^file.yaml:1: transport.secret: file 'nope.txt' cannot be read: No such"):
        load_settings(file, env={})


def test_references_of_layers_that_lost_are_not_looked_up(config_file: ConfigFile) -> None:
    path = config_file("namespace: ${env:NOPE}\nprofiles: {p: {namespace: '${env:NOPE}'}}")

    assert load_settings(path, env={"DYN_NAMESPACE": "x"}).settings.namespace == "x"


@pytest.mark.parametrize("value", ["${foo:x}", "${NAME}", "${env:NAME", "a ${ b", "${:x}", "${ENV:NAME}"])
def test_a_reference_of_an_unknown_form_is_refused(config_file: ConfigFile, value: str) -> None:
    path = config_file(f"transport:\n  use: nats\n  dsn: '{value}'")

    with pytest.raises(ConfigError) as caught:
        load_settings(path, env={"NAME": "x"})

    assert str(caught.value) == (
        "config.yaml:3: transport.dsn: '${' begins no known reference: write ${env:NAME} or ${file:PATH}, "
        "or $${ for a plain ${"
    )


def test_settings_can_be_viewed_with_missing_references(config_file: ConfigFile) -> None:
    path = config_file(
        """
        frontend: {port: "${env:PORT}"}
        transport: {use: nats, key: "${env:KEY}", other: ["${file:key.txt}"]}
        workers: {mock: {model: {name: "${env:MODEL}"}, engine: {use: mocker}}}
        """
    )

    view = view_settings(path, env={"MODEL": SECRET})

    shown = {key: value for key, value, _ in view.rows()}
    assert shown["frontend.port"] == "*** (environment variable 'PORT' is not set)"
    assert shown["transport.key"] == "*** (environment variable 'KEY' is not set)"
    assert shown["transport.other"] == "*** (file 'key.txt' cannot be read: No such file or directory)"
    assert shown["workers.mock.model.name"] == "***"
    assert view.origin("transport.key") == "config.yaml:2"
    with pytest.raises(ConfigError):
        load_settings(path, env={"MODEL": SECRET})


def test_a_view_reports_errors_beside_a_missing_reference(config_file: ConfigFile) -> None:
    path = config_file('frontend: {port: "${env:PORT}"}\nlog: {level: loud}')

    with pytest.raises(ConfigError, match=r"^config.yaml:2: log.level: expected"):
        view_settings(path, env={})
