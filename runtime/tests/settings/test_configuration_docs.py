"""docs/reference/configuration.md says what the code does: names exist, examples load, errors are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dynamo_plugin_frontend_anthropic.config import AnthropicConfig
from dynamo_plugin_frontend_openai.config import OpenAIConfig
from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_runtime.settings import FLAGS, PROCESS_NAMES, load_settings

from scripts.pages.configuration import setting_rows

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def table_under(heading: str) -> list[tuple[str, ...]]:
    """Return the rows of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    lines = re.split(r"^#", section, flags=re.MULTILINE)[0].splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines if line.startswith("|")]
    return rows[2:]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_names_that_are_no_settings_are_listed() -> None:
    assert [row[0] for row in table_under("Variables that are not settings")] == [f"`{name}`" for name in PROCESS_NAMES]


def test_every_flag_names_a_key_that_exists() -> None:
    keys = {row[0].strip("`").replace("NAME", "*") for row in setting_rows()}
    # The plugins whose own keys have short names.
    apis = (OpenAIConfig, ResponsesConfig, AnthropicConfig)
    keys |= {f"frontend.{key}" for api in apis for key in api.model_fields}
    keys |= {f"router.{key}" for key in KvConfig.model_fields}

    for flag in FLAGS:
        assert flag.key in keys, flag
        assert flag.flag or flag.env
        assert flag.env_only is (flag.flag is None)
    for names in ([flag.flag for flag in FLAGS if flag.flag], [flag.env for flag in FLAGS if flag.env]):
        assert len(names) == len(set(names))


def test_the_yaml_and_toml_examples_load(tmp_path: Path) -> None:
    full = tmp_path / "dynamo.yaml"
    full.write_text(blocks("yaml")[0], encoding="utf-8")

    for profile in (None, "processes", "production"):
        loaded = load_settings(full, profile=profile, env={"NATS_PASSWORD": "x"})
        assert loaded.settings.workers["mock"].model.name == "mock-model"
    toml = tmp_path / "dynamo.toml"
    toml.write_text(blocks("toml")[0], encoding="utf-8")
    assert load_settings(toml, env={}).settings.workers["mock"].engine.use == "mocker"


@pytest.mark.parametrize("line", [line for line in (blocks("text") or [""])[0].splitlines() if line])
def test_the_error_messages_shown_are_real(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo_core.contracts.config import PluginConfig
    from dynamo_core.errors import ConfigError
    from pydantic import Field

    class Mocker(PluginConfig):
        speedup_ratio: float = Field(1.0)

    monkeypatch.chdir(tmp_path)
    assert line.startswith("dynamo: ")
    worker = "\n" * 6 + "workers:\n  mock:\n    model: {name: m}\n    engine: {use: mocker}\n"
    sets = ["frontend.prot=1"] if "frontend.prot" in line else []
    section: tuple[str, type[PluginConfig]] = ("frontend", PluginConfig) if sets else ("workers.mock.engine", Mocker)
    causes: dict[str, tuple[str, dict[str, str]]] = {
        "frontend.prot": ("", {}),
        "unknown key 'rooter'": ("\n" * 6 + "rooter: {use: kv}", {}),
        "expected an integer": (worker.replace("\n" * 6, "\n" * 4, 1) + "    replicas: two", {}),
        "DYN_TRANSPROT__USE": ("", {"DYN_TRANSPROT__USE": "tcp"}),
        "speedup_ratoi": (worker.replace("use: mocker", "use: mocker,\n      speedup_ratoi: 2"), {}),
    }
    text, env = next(value for part, value in causes.items() if part in line)
    Path("dynamo.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_settings(Path("dynamo.yaml"), env=env, sets=sets).plugin_config(*section)

    assert f"dynamo: {caught.value}" == line


def test_the_plugins_that_the_profiles_of_the_page_need_are_there() -> None:
    said = re.search(r"`processes`\s+needs (.*?)\. `dynamo plugins`", PAGE.read_text(encoding="utf-8"), re.DOTALL)

    assert said is not None
    for name in set(re.findall(r"`(\w+)`", said[1])) - {"production"}:
        assert list(PAGE.parents[2].glob(f"plugins/*/{name}")), name
