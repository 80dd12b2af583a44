"""APIs that ``--set`` and the environment list, and keys of APIs that are not served."""

from __future__ import annotations

from pathlib import Path

import pytest
from dynamo_core.errors import ConfigError
from dynamo_core.plugins.loader import PluginLoader
from dynamo_runtime.assembly.api_set import apis_of
from dynamo_runtime.assembly.resolve import resolve
from dynamo_runtime.settings import load_settings

CONFIG = "workers: {mock: {model: {name: m}, engine: {use: mocker}}}\nfrontend: "
LIST = "[{use: openai}, {use: ollama, port: 8005}]"


@pytest.mark.parametrize(
    ("sets", "env"), [([f"frontend={LIST}"], {}), ([], {"DYN_FRONTEND": LIST})], ids=["set", "environment"]
)
@pytest.mark.parametrize("written", ["{}", "{host: 127.0.0.3}", "[{use: anthropic, host: 127.0.0.3}]"])
def test_a_list_of_apis_takes_the_place_of_those_of_the_file(
    tmp_path: Path, written: str, sets: list[str], env: dict[str, str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + written)

    loaded = load_settings(path, env=env, sets=sets)

    frontend = resolve(loaded, PluginLoader()).frontend
    assert frontend is not None
    assert apis_of(frontend.cls) == ["openai", "ollama"]
    assert loaded.settings.frontend.port == 8005
    assert loaded.settings.frontend.host == ("127.0.0.3" if "host" in written else "127.0.0.1")


def test_a_list_of_apis_that_cannot_be_used_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"--set frontend=\[\{use: openai\}, \{port: 1\}\].*expected an API such as"):
        load_settings(env={}, sets=["frontend=[{use: openai}, {port: 1}]"])


@pytest.mark.parametrize(
    ("written", "key", "advice"),
    [
        ("[{use: openai, responses_path: /r}]", "responses_path", "{use: openai}, {use: responses}"),
        ("[{use: openai}, {use: ollama, messages_path: /m}]", "messages_path", "{use: ollama}, {use: anthropic}"),
        ("{use: ollama, chat_path: /c}", "chat_path", "{use: ollama}, {use: openai}"),
    ],
)
def test_a_key_of_an_api_that_is_not_served_says_how_to_serve_it(
    tmp_path: Path, written: str, key: str, advice: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + written)

    with pytest.raises(ConfigError) as refused:
        resolve(load_settings(path, env={}), PluginLoader())

    assert str(refused.value).startswith(f"{path}:2: frontend.{key}: is a key of the API ")
    assert f"{advice}], or leave it out" in str(refused.value)


def test_a_key_that_no_api_has_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + "[{use: openai, chat_pat: /c}]")

    with pytest.raises(ConfigError, match="unknown key of frontend 'openai'; did you mean 'chat_path'"):
        resolve(load_settings(path, env={}), PluginLoader())
