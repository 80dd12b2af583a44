"""The command line of an engine that runs alone: what wins, what help says, what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    LLMEngine,
    PluginConfig,
    WorkerConfig,
)
from dynamo_core.contracts.engine_boundary import make_engine
from dynamo_core.errors import ConfigError
from dynamo_runtime import CommonArgs, engine_main, from_args, run
from pydantic import Field, SecretStr

from runtime.tests.worker.engines import Plain


class Small(PluginConfig):
    """Settings of every shape that a flag can have."""

    block_size: int = Field(default=64, ge=1, description="Tokens per block; 100% of them.")
    ratio: float = Field(default=1.0, description="How fast.")
    caching: bool = Field(default=True, description="Keep blocks.")
    policy: Literal["first", "last"] = Field(default="first", description="Who goes.")
    names: tuple[str, ...] = Field(default=(), description="Some words.")
    label: str | None = Field(default=None, description="A word.")
    token: SecretStr = Field(default=SecretStr("hush"), description="A secret.")
    #: As one of the common flags is called.
    endpoint: str = Field(default="here", description="Something of the engine's own.")


class SmallEngine(Plain):
    """Says little.

    And this is not shown.
    """

    NAME = "small-one"
    Config: ClassVar[type[PluginConfig]] = Small


class PlainEngine(Plain):
    """Has no settings."""

    NAME = "plain"


def made(*argv: str, env: dict[str, str] | None = None) -> tuple[Any, WorkerConfig]:
    """Return the settings of an engine, and its worker."""
    engine, worker = from_args(SmallEngine, argv, env=env or {})
    assert isinstance(engine, SmallEngine)
    assert engine.worker is worker
    return engine.config, worker


def test_without_any_flag_everything_has_its_default() -> None:
    config, worker = made()

    assert config == Small()
    assert (worker.worker, worker.model_name, worker.namespace) == ("small_one", "small-one-model", "dynamo")
    assert (worker.component, worker.endpoint, worker.endpoint_types) == (
        "backend",
        "generate",
        ("chat", "completions"),
    )
    assert worker.disaggregation_mode is DisaggregationMode.AGGREGATED


def test_every_common_flag_reaches_the_worker(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"

    _, worker = made(
        *("--model-name", "007", "--model-path", "/models/a", "--custom-jinja-template", str(template)),
        *("--namespace", "prod", "--component", "c", "--endpoint", "e", "--endpoint-types", "chat, embeddings"),
        *("--disaggregation-mode", "Decode", "--migration-limit", "3", "--worker", "mine"),
    )

    assert (worker.model_name, worker.served_model_name, worker.model_path) == ("007", "007", "/models/a")
    assert worker.custom_jinja_template == str(template)
    assert (worker.namespace, worker.component, worker.endpoint) == ("prod", "c", "e")
    assert worker.endpoint_types == ("chat", "embeddings")
    assert worker.disaggregation_mode is DisaggregationMode.DECODE
    assert (worker.migration_limit, worker.worker) == (3, "mine")


def test_a_flag_for_every_field_of_the_settings_reaches_the_engine() -> None:
    config, _ = made(
        *("--block-size", "32", "--ratio", "0.5", "--no-caching", "--policy", "last", "--names", "[a, b]"),
        *("--label", "010", "--engine-endpoint", "there"),
    )

    assert config == Small(
        block_size=32, ratio=0.5, caching=False, policy="last", names=("a", "b"), label="010", endpoint="there"
    )


def test_a_flag_beats_set_which_beats_the_variable_which_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.yaml"
    path.write_text("namespace: file\nworkers: {small_one: {engine: {ratio: 1, block_size: 1, label: file}}}\n")
    env = {"DYN_NAMESPACE": "variable", "DYN_WORKERS__SMALL_ONE__ENGINE__RATIO": "2"}
    below = ("--config", str(path))
    sets = (*below, "--set", "namespace=set", "--set", "workers.small_one.engine.ratio=3")
    flags = (*sets, "--namespace", "flag", "--ratio", "4")

    seen = []
    for argv, variables in ((below, {}), (below, env), (sets, env), (flags, env)):
        config, worker = made(*argv, env=variables)
        seen.append((worker.namespace, config.ratio))
        assert (config.block_size, config.label) == (1, "file")

    assert seen == [("file", 1.0), ("variable", 2.0), ("set", 3.0), ("flag", 4.0)]


def test_a_worker_of_the_config_file_is_taken_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.yaml"
    path.write_text("workers: {a: {model: {name: the-a}, engine: {use: small-one, block_size: 8}, component: inner}}\n")

    config, worker = made("--worker", "a", env={"DYN_CONFIG": str(path)})

    assert (config.block_size, worker.worker, worker.model_name, worker.component) == (8, "a", "the-a", "inner")


def test_a_worker_of_another_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.yaml"
    path.write_text("workers: {a: {model: {name: m}, engine: {use: other}}}\n")

    with pytest.raises(ConfigError, match=r"dynamo.yaml:1: workers.a.engine.use: is 'other', but the engine that runs"):
        made("--config", str(path), "--worker", "a")


def test_common_flags_are_passed_to_run() -> None:
    _, worker = made("--request-plane", "nats", "--set", "discovery.path=/x", "--engine-request-limit", "4")

    assert worker.runtime.overrides == ("discovery.path=/x",)
    assert worker.runtime.flags == {"--request-plane": "nats", "--engine-request-limit": "4"}


@pytest.mark.parametrize(
    ("argv", "env", "complaint"),
    [
        (
            ("--block-size", "0"),
            {},
            "flag --block-size: workers.small_one.engine.block_size: must be at least 1, got 0",
        ),
        (("--policy", "none"), {}, "flag --policy: workers.small_one.engine.policy: expected 'first' or 'last'"),
        (("--migration-limit", "two"), {}, "flag --migration-limit: .*: expected an integer, got 'two'"),
        (
            (),
            {"DYN_DISAGGREGATION_MODE": "both"},
            "environment DYN_DISAGGREGATION_MODE: .*: unknown disaggregation mode",
        ),
        ((), {"DYN_NAMSPACE": "x"}, "environment DYN_NAMSPACE: unknown setting; did you mean DYN_NAMESPACE"),
        (
            ("--set", "workers.small_one.engine.block_siz=1"),
            {},
            "unknown key of engine 'small-one'; did you mean 'block_size'",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(argv: tuple[str, ...], env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        made(*argv, env=env)


def test_an_unknown_mode_is_the_invalid_argument_of_the_contract() -> None:
    with pytest.raises(
        BackendError.InvalidArgument, match=r"unknown disaggregation mode 'both' \(expected one of: agg"
    ):
        made("--disaggregation-mode", "both")


def test_an_unknown_flag_ends_the_process_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        made("--blok-size", "1")

    assert ended.value.code == 2
    assert "unrecognized arguments: --blok-size" in capsys.readouterr().err


def helped(engine: type[LLMEngine], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        from_args(engine, ["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_common_part_of_the_help_is_the_same_for_all_engines(capsys: pytest.CaptureFixture[str]) -> None:
    small, plain = helped(SmallEngine, capsys), helped(PlainEngine, capsys)

    common = plain[plain.index("common options:") :].rstrip()
    assert common in small
    for words in (
        "--namespace",
        "DYN_DISAGGREGATION_MODE",
        "(default: tcp)",
        "(default: file)",
        "--system-port",
        "--set",
    ):
        assert words in common
    assert "options of this engine:" not in plain


def test_the_engines_own_part_has_descriptions_and_defaults_but_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(helped(SmallEngine, capsys).split())

    assert "Says little." in text
    assert "not shown" not in text
    for words in (
        "--block-size N Tokens per block; 100% of them. (default: 64)",
        "--caching, --no-caching Keep blocks. (default: on)",
        "--policy {first,last} Who goes. (default: first)",
        "--label TEXT A word. --token",
        "--engine-endpoint TEXT Something of the engine's own. (default: here)",
    ):
        assert words in text
    assert "--token VALUE A secret. --engine-endpoint" in text


def test_an_engine_with_a_parser_of_its_own_adds_the_common_flags_to_it() -> None:
    parser = argparse.ArgumentParser()
    CommonArgs.add_to(parser)
    parser.add_argument("--weights")

    parsed = parser.parse_args(["--weights", "w.bin", "--namespace", "prod"])
    worker = CommonArgs.of(parsed).worker_config("my-own", model_name="a-model", env={"DYN_ENDPOINT": "other"})

    assert parsed.weights == "w.bin"
    assert (worker.worker, worker.model_name, worker.namespace, worker.endpoint) == (
        "my_own",
        "a-model",
        "prod",
        "other",
    )


def test_the_class_makes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["main.py", "--model-name", "mine"])

    engine, worker = from_args(PlainEngine)

    assert isinstance(engine, PlainEngine)
    assert worker.model_name == "mine"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendError.InvalidArgument("no such weights"), 2),
        (ConfigError("no such weights"), 2),
        (BackendError.CannotConnect("no such weights"), 1),
    ],
)
def test_an_error_of_from_args_is_one_line_and_an_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        @classmethod
        async def from_args(cls, argv: object = None) -> tuple[Any, WorkerConfig]:
            raise error

    with pytest.raises(SystemExit) as ended:
        engine_main(Refusing)

    assert ended.value.code == code
    assert capsys.readouterr().err == "dynamo: no such weights\n"


@pytest.mark.parametrize(
    ("made", "came"),
    [
        (None, "None"),
        ("engine", "a str"),
        ((1, 2), "(an int, an int)"),
        ((1, WorkerConfig(), 3), "(an int, a WorkerConfig, an int)"),
        ((WorkerConfig(), 1), "(a WorkerConfig, an int)"),
    ],
)
def test_a_wrong_from_args_result_is_named_with_the_expected_type(
    capsys: pytest.CaptureFixture[str], made: Any, came: str
) -> None:
    class Careless:
        @staticmethod
        def from_args(argv: Any = None) -> Any:
            return made

    with pytest.raises(SystemExit) as caught:
        engine_main(Careless())

    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"Careless.from_args returned {came}, expected (engine, WorkerConfig) (test_engine_args.py, line " in said


def test_running_with_another_kind_of_worker_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(SmallEngine(Small(), WorkerConfig()), {"model_name": "m"})  # type: ignore[arg-type]

    assert caught.value.code == 2
    assert "run(engine, worker_config) was given a dict, expected a WorkerConfig" in capsys.readouterr().err


def test_a_constructor_that_takes_something_else_is_named() -> None:
    class Own(SmallEngine):
        def __init__(self) -> None:
            super().__init__(Small(), WorkerConfig())

    with pytest.raises(BackendError, match=r"Own cannot be made .* write `def __init__\(self, config, worker\)`"):
        make_engine(Own, Small(), WorkerConfig())
