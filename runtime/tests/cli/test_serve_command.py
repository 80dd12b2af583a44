from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from dynamo_core.errors import ConfigError
from dynamo_runtime.cli.serve import command
from dynamo_runtime.settings import FLAGS, LoadedSettings

RunCli = Callable[..., Result]


class Served:
    """Stands in for the runtime, whose own tests run it: keeps what it was given and ends with a code."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.given: list[LoadedSettings] = []
        self.parts: list[tuple[str | None, int | None]] = []

    def __call__(
        self, loaded: LoadedSettings, *, only: str | None, replica: int | None, arguments: Sequence[str]
    ) -> int:
        self.given.append(loaded)
        self.parts.append((only, replica))
        return self.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    monkeypatch.setattr("dynamo_runtime.app.serve", served)
    return served


def test_every_flag_of_the_table_is_an_option() -> None:
    options = {name for parameter in command.params for name in parameter.opts}

    assert {flag.flag for flag in FLAGS if flag.flag is not None} <= options


def test_flags_win_over_set_and_are_named_as_origin(dynamo: RunCli, config: Path, served: Served) -> None:
    result = dynamo("serve", config, "--set", "frontend.port=8001", "--http-port", "8002")

    [loaded] = served.given
    assert result.exit_code == 0
    assert loaded.settings.frontend.port == 8002
    assert "--http-port" in loaded.origin("frontend.port")


def test_a_flag_that_is_not_given_changes_nothing(dynamo: RunCli, config: Path, served: Served) -> None:
    dynamo("serve", config)

    [loaded] = served.given
    assert loaded.settings.frontend.port == 8000
    assert loaded.settings.router.use == "fake"


def test_the_code_of_the_runtime_is_the_code_of_the_command(dynamo: RunCli, config: Path, served: Served) -> None:
    served.code = 70

    assert dynamo("serve", config).exit_code == 70


def test_dev_switches_the_checks_of_streams_on(
    dynamo: RunCli, config: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_STREAM_VALIDATOR", "")
    monkeypatch.delenv("DYN_STREAM_VALIDATOR")

    dynamo("serve", config)
    without = os.environ.get("DYN_STREAM_VALIDATOR")
    dynamo("serve", config, "--dev")

    assert without is None
    assert os.environ["DYN_STREAM_VALIDATOR"] == "1"


def test_a_config_error_of_the_runtime_is_one_line(
    dynamo: RunCli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(loaded: LoadedSettings, **role: object) -> int:
        raise ConfigError("frontend.port: 8000 is in use")

    monkeypatch.setattr("dynamo_runtime.app.serve", refuse)

    result = dynamo("serve", config)

    assert result.exit_code == 2
    assert result.stderr == "dynamo: frontend.port: 8000 is in use\n"


def test_an_unknown_option_is_refused_with_a_hint(dynamo: RunCli, config: Path) -> None:
    result = dynamo("serve", config, "--http-prot", "8000")

    assert result.exit_code == 2
    assert "--http-port" in result.stderr


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (["serve"], (None, None)),
        (["serve", "--only", "frontend"], ("frontend", None)),
        (["serve", "--only", "frontend", "--replica", "0"], ("frontend", 0)),
        (["serve", "--only", "workers.mock", "--replica", "2"], ("workers.mock", 2)),
        (["frontend"], ("frontend", None)),
        (["worker", "mock"], ("workers.mock", None)),
        (["worker", "mock", "--replica", "1"], ("workers.mock", 1)),
    ],
)
def test_only_and_replica_select_the_part_to_run(
    dynamo: RunCli, served: Served, line: list[str], part: tuple[str | None, int | None]
) -> None:
    dynamo(*line)

    assert served.parts == [part]


def test_an_unknown_worker_is_reported_with_the_near_name(dynamo: RunCli, served: Served) -> None:
    result = dynamo("worker", "mokc")

    assert (result.exit_code, result.stderr) == (
        2,
        "dynamo: worker mokc: there is no such worker; did you mean 'mock'?\n",
    )
    assert served.parts == []


def test_a_model_folder_sets_path_and_name(dynamo: RunCli, tmp_path: Path, served: Served) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()

    dynamo("serve", "--engine", "fake", "--model", f"{folder}/")
    dynamo("serve", "--engine", "fake", "--model", str(folder), "--model-name", "other")

    models = [loaded.settings.workers["fake"].model for loaded in served.given]
    assert [(model.path, model.name) for model in models] == [(str(folder), "tiny-llama"), (str(folder), "other")]


def test_a_model_that_is_no_folder_is_a_name(dynamo: RunCli, served: Served) -> None:
    dynamo("serve", "--engine", "fake", "--model", "org/some-model")

    [loaded] = served.given
    model = loaded.settings.workers["fake"].model
    assert (model.path, model.name) == (None, "org/some-model")


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all"])
def test_a_model_that_can_only_be_a_folder_has_to_be_there(dynamo: RunCli, served: Served, path: str) -> None:
    result = dynamo("serve", "--engine", "fake", "--model", path)

    assert result.exit_code == 2
    assert f"--model {path}: there is no such folder" in result.output
    assert served.given == []
