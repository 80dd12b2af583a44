"""Which layer wins, and what is said of where a value came from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo_core.contracts.engine import DisaggregationMode
from dynamo_runtime.settings import PROCESS_NAMES, load_settings
from dynamo_runtime.settings.layers import merge
from dynamo_runtime.settings.tree import Leaf, Table, find, from_plain, leaves
from hypothesis import given
from hypothesis import strategies as st

ConfigFile = Callable[..., Path]

FULL = """
frontend: {use: openai, port: 9000, api: old}
transport:
  use: nats
  servers: [nats://one]
workers:
  mock:
    model: {name: m}
    engine: {use: mocker, speedup_ratio: 10}
    replicas: 2
  other:
    model: {name: m}
    engine: {use: mocker}
profiles:
  production:
    transport: {use: tcp}
    workers: {mock: {replicas: 3}}
"""


def test_without_a_file_the_built_in_example_is_served_by_the_mocker() -> None:
    loaded = load_settings(env={})

    settings = loaded.settings
    assert settings.frontend.use == "openai"
    assert settings.router.use == "round-robin"
    assert settings.transport.use == "inproc"
    assert settings.discovery.use == "memory"
    assert settings.workers["mock"].model.name == "mock-model"
    assert settings.workers["mock"].engine.use == "mocker"
    assert settings.workers["mock"].replicas == 1
    example = {key for key, _, origin in loaded.rows() if origin == "built-in example"}
    assert example == {f"workers.mock.{key}" for key in ("model.name", "engine.use", "replicas")}
    assert {origin for key, _, origin in loaded.rows() if key not in example} == {"default"}


def test_warn_is_another_word_for_the_level_warning() -> None:
    loaded = load_settings(env={"DYN_LOG": "warn"})

    assert loaded.settings.log.level == "warning"


def test_a_file_replaces_the_workers_of_the_example(config_file: ConfigFile) -> None:
    with_workers = config_file("workers: {gpu: {model: {name: m}, engine: {use: vllm}}}", "a.yaml")
    without = config_file("namespace: x", "b.yaml")

    assert list(load_settings(with_workers, env={}).settings.workers) == ["gpu"]
    assert list(load_settings(without, env={}).settings.workers) == []


def test_the_environment_is_read_from_the_argument_and_nowhere_else(monkeypatch: Any) -> None:
    monkeypatch.setenv("NAMESPACE", "hidden")
    monkeypatch.setenv("DYN_NAMESPACE", "hidden")

    assert load_settings(env={}).settings.namespace == "dynamo"


def test_origins_name_the_line_the_profile_the_variable_the_argument_and_the_flag(config_file: ConfigFile) -> None:
    path = config_file(FULL)

    loaded = load_settings(
        path,
        profile="production",
        env={"DYN_CLIENT__RETRIES": "4", "DYN_LOG": "debug"},
        sets=["namespace=blue"],
        flags={"--router-mode": "kv", "--http-host": None},
    )

    assert loaded.origin("frontend.port") == "config.yaml:1"
    assert loaded.origin("workers.mock.model.name") == "config.yaml:7"
    assert loaded.origin("workers.mock.replicas") == "profile production (config.yaml:16)"
    assert loaded.origin("client.retries") == "environment DYN_CLIENT__RETRIES"
    assert loaded.origin("log.level") == "environment DYN_LOG"
    assert loaded.origin("namespace") == "--set namespace=blue"
    assert loaded.origin("router.use") == "flag --router-mode"
    assert loaded.origin("frontend.host") == "default"
    assert loaded.origin("workers.mock.engine.never_set") == "default"


def test_a_layer_that_changes_use_drops_the_plugin_keys_below_it_and_keeps_common_keys(config_file: ConfigFile) -> None:
    path = config_file(FULL)

    by_profile = load_settings(path, profile="production", env={})
    by_env = load_settings(path, env={"DYN_FRONTEND__USE": "grpc", "DYN_FRONTEND__STREAMS": "5"})
    by_flat_name = load_settings(path, env={"DYN_REQUEST_PLANE": "tcp"})
    by_flag = load_settings(path, env={}, flags={"--request-plane": "tcp"})
    by_set = load_settings(path, env={}, sets=["workers.mock.engine.use=vllm"])

    assert by_profile.dump()["transport"] == {"use": "tcp"}
    common = {
        "apis": None,
        "host": "127.0.0.1",
        "processes": 1,
        "tls": {"cert": None, "key": None, "client_ca": None},
        "response_store": {"use": None},
    }
    assert by_env.dump()["frontend"] == {"use": "grpc", "port": 9000, "streams": 5} | common
    assert by_flat_name.dump()["transport"] == {"use": "tcp"}
    assert by_flag.dump()["transport"] == {"use": "tcp"}
    assert by_set.dump()["workers"]["mock"]["engine"] == {"use": "vllm"}
    assert by_set.dump()["workers"]["mock"]["replicas"] == 2


def test_a_layer_that_repeats_use_keeps_the_plugin_keys_below_it(config_file: ConfigFile) -> None:
    path = config_file(FULL)

    loaded = load_settings(path, env={"DYN_REQUEST_PLANE": "nats"}, sets=["transport.user=me"])

    assert loaded.dump()["transport"] == {"use": "nats", "servers": ["nats://one"], "user": "me"}


def test_naming_the_default_plugin_explicitly_keeps_keys_written_for_it(config_file: ConfigFile) -> None:
    path = config_file("router: {threshold: 4}")

    same = load_settings(path, env={"DYN_ROUTER_MODE": "round-robin"})
    changed = load_settings(path, env={"DYN_ROUTER_MODE": "kv"})

    assert same.settings.router.options == {"threshold": 4}
    assert changed.settings.router.options == {}


def test_a_flag_for_workers_sets_every_worker(config_file: ConfigFile) -> None:
    path = config_file(FULL)

    loaded = load_settings(
        path, env={"DYN_ENGINE_REQUEST_LIMIT": "8"}, flags={"--migration-limit": 3, "--disaggregation-mode": "prefill"}
    )

    for worker in loaded.settings.workers.values():
        assert worker.engine_request_limit == 8
        assert worker.model.migration_limit == 3
        assert worker.disaggregation_mode == "prefill"


def test_a_nested_variable_beats_a_flat_one_for_the_same_key() -> None:
    loaded = load_settings(env={"DYN_HTTP_PORT": "1", "DYN_FRONTEND__PORT": "2"})

    assert loaded.settings.frontend.port == 2
    assert loaded.origin("frontend.port") == "environment DYN_FRONTEND__PORT"


def test_variables_may_be_lower_case_mappings_and_empty() -> None:
    loaded = load_settings(
        env={
            "dyn_workers__mock__replicas": "4",
            "DYN_ROUTER": "{use: kv, weights: {a: 1}}",
            "DYN_ROUTER__WEIGHTS__B": "2",
            "DYN_NAMESPACE": "",
        }
    )

    assert loaded.settings.workers["mock"].replicas == 4
    assert loaded.settings.router.options == {"weights": {"a": 1, "b": 2}}
    assert loaded.origin("namespace") == "default"


def test_variables_reach_workers_whose_names_hold_underscores(config_file: ConfigFile) -> None:
    worker = "{model: {name: m}, engine: {use: mocker}}"
    path = config_file(f"workers: {{a: {worker}, a__b: {worker}, c_: {worker}}}")

    loaded = load_settings(path, env={"DYN_WORKERS__A__B__REPLICAS": "2", "DYN_WORKERS__C___REPLICAS": "3"})

    assert [worker.replicas for worker in loaded.settings.workers.values()] == [1, 2, 3]


def test_the_environment_can_add_a_whole_worker() -> None:
    loaded = load_settings(
        env={"DYN_WORKERS__GPU__ENGINE__USE": "vllm", "DYN_WORKERS__GPU__MODEL__NAME": "m", "DYN_MIGRATION_LIMIT": "2"}
    )

    assert loaded.settings.workers["gpu"].engine.use == "vllm"
    assert loaded.settings.workers["gpu"].model.migration_limit == 2


def test_the_environment_names_the_file_and_the_profile_if_nothing_else_does(config_file: ConfigFile) -> None:
    first = config_file(FULL, "first.yaml")
    second = config_file("namespace: second", "second.yaml")

    named = load_settings(env={"DYN_CONFIG": str(first), "DYN_PROFILE": "production", "DYN_STREAM_VALIDATOR": "1"})
    argument_wins = load_settings(second, env={"DYN_CONFIG": str(first)})

    assert named.settings.transport.use == "tcp"
    assert argument_wins.settings.namespace == "second"


@pytest.mark.parametrize("name", PROCESS_NAMES)
def test_a_variable_that_is_for_the_command_is_not_taken_for_a_setting(config_file: ConfigFile, name: str) -> None:
    path = config_file(FULL, "whole.yaml")
    value = str(path) if name == "DYN_CONFIG" else "production"

    with_it = load_settings(path, env={name: value})

    assert with_it.settings.workers.keys() == load_settings(path, env={}).settings.workers.keys()


def test_a_section_with_nothing_in_it_changes_nothing(config_file: ConfigFile) -> None:
    path = config_file(
        """
        log:
        frontend:
        profiles:
          quiet:
            log:
        """
    )

    loaded = load_settings(path, profile="quiet", env={})

    assert loaded.settings.log.level == "info"
    assert loaded.settings.frontend.port == 8000


def test_what_looks_like_a_number_or_a_bool_may_be_meant_as_words(config_file: ConfigFile) -> None:
    path = config_file("workers: {mock: {model: {name: 1_000, path: no}, engine: {use: 7}}}")

    loaded = load_settings(path, env={"DYN_NAMESPACE": "0123", "DYN_METRICS_PREFIX": "on"})

    worker = loaded.settings.workers["mock"]
    assert (worker.model.name, worker.model.path, worker.engine.use) == ("1_000", "no", "7")
    assert loaded.settings.namespace == "0123"
    assert loaded.settings.http.metrics_prefix == "on"
    assert loaded.dump()["namespace"] == "0123"


def test_modes_and_levels_may_be_written_as_people_write_them() -> None:
    loaded = load_settings(
        env={"DYN_DISAGGREGATION_MODE": " Aggregated ", "DYN_LOG": "INFO", "DYN_LOGGING_JSONL": "1"},
        sets=["workers.mock.endpoint_types=chat,embeddings"],
    )

    assert loaded.settings.workers["mock"].disaggregation_mode == "agg"
    assert loaded.settings.workers["mock"].endpoint_types == ("chat", "embeddings")
    assert loaded.settings.log.level == "info"
    assert loaded.settings.log.json_lines is True


def test_the_modes_are_those_of_the_engine_contract() -> None:
    for mode in DisaggregationMode:
        loaded = load_settings(env={}, flags={"--disaggregation-mode": mode.value})

        assert DisaggregationMode(loaded.settings.workers["mock"].disaggregation_mode) is mode


def test_a_dump_is_the_callers_own_and_can_be_loaded_again(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(FULL), env={})
    again = config_file(yaml.safe_dump(loaded.dump(redact=False)), "again.yaml")

    loaded.dump()["hooks"].append("mine")

    assert loaded.dump()["hooks"] == []
    assert load_settings(again, env={}).settings == loaded.settings


LAYERS = ("file", "profile", "environment", "--set", "flag")


@given(
    st.dictionaries(st.sampled_from(LAYERS), st.integers(0, 65535)),
    st.dictionaries(st.sampled_from(LAYERS), st.sampled_from(["a", "b"])),
)
def test_the_winner_is_always_the_last_layer_that_set_the_key(ports: dict[str, int], routers: dict[str, str]) -> None:
    def part(layer: str) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        if layer in ports:
            tree["frontend"] = {"port": ports[layer]}
        if layer in routers:
            tree["router"] = {"use": routers[layer], f"key_of_{layer.strip('-')}": 1}
        return tree

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_text(yaml.safe_dump({**part("file"), "profiles": {"p": part("profile")}}), encoding="utf-8")
        env = {}
        sets = []
        flags: dict[str, object] = {}
        if "environment" in ports:
            env["DYN_HTTP_PORT"] = str(ports["environment"])
        if "environment" in routers:
            env["DYN_ROUTER__USE"] = routers["environment"]
            env["DYN_ROUTER__KEY_OF_ENVIRONMENT"] = "1"
        if "--set" in ports:
            sets.append(f"frontend.port={ports['--set']}")
        if "--set" in routers:
            sets += [f"router.use={routers['--set']}", "router.key_of_set=1"]
        if "flag" in ports:
            flags["--http-port"] = ports["flag"]
        if "flag" in routers:
            flags["--router-mode"] = routers["flag"]

        loaded = load_settings(path, profile="p", env=env, sets=sets, flags=flags)

    last = next((layer for layer in reversed(LAYERS) if layer in ports), "default")
    assert loaded.settings.frontend.port == ports.get(last, 8000)
    assert loaded.origin("frontend.port").startswith(str(path) if last == "file" else last)

    chain = [layer for layer in LAYERS if layer in routers]
    winner = routers[chain[-1]] if chain else "round-robin"
    kept: list[str] = []
    for layer in chain:
        if chain.index(layer) and routers[layer] != routers[chain[chain.index(layer) - 1]]:
            kept = []
        kept += [f"key_of_{layer.strip('-')}"] if layer != "flag" else []
    assert loaded.settings.router.use == winner
    assert sorted(loaded.settings.router.options) == sorted(kept)


TREES = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda below: st.dictionaries(st.sampled_from("abc"), below, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(st.lists(TREES, min_size=1, max_size=5))
def test_merged_trees_hold_for_every_path_what_the_last_tree_on_it_says(layers: list[dict[str, Any]]) -> None:
    tables = []
    for number, layer in enumerate(layers):
        table = from_plain(layer, str(number))
        assert isinstance(table, Table)
        tables.append(table)

    merged = tables[0]
    for table in tables[1:]:
        merged = merge(merged, table)

    for path, leaf in leaves(merged):
        source = find(tables[int(leaf.origin)], path)
        assert isinstance(source, Leaf)
        assert source.value == leaf.value
        for later in tables[int(leaf.origin) + 1 :]:
            # Nothing later sets the path, what is above it, or what is below it.
            assert all(
                find(later, path[:depth]) is None or isinstance(find(later, path[:depth]), Table)
                for depth in range(1, len(path))
            ), path
            assert find(later, path) is None


def test_a_flag_that_picks_a_plugin_keeps_the_keys_that_set_gives_it() -> None:
    loaded = load_settings(env={}, sets=["router.seed=3"], flags={"--router-mode": "random"})

    assert loaded.settings.router.use == "random"
    assert loaded.settings.router.options == {"seed": 3}


def test_a_flag_that_picks_another_plugin_than_set_drops_what_set_gave_that_one() -> None:
    loaded = load_settings(env={}, sets=["router.use=kv", "router.seed=3"], flags={"--router-mode": "random"})

    assert loaded.settings.router.use == "random"
    assert loaded.settings.router.options == {}


def test_without_a_file_a_flag_for_the_engine_makes_one_worker_that_is_called_as_the_engine() -> None:
    loaded = load_settings(env={}, sets=["workers.my_engine.engine.depth=2"], flags={"--engine": "my-engine"})

    [(name, worker)] = loaded.settings.workers.items()
    assert (name, worker.engine.use, worker.engine.options) == ("my_engine", "my-engine", {"depth": 2})
    assert worker.model.name == "my-engine-model"
    assert loaded.origin("workers.my_engine.engine.use") == "flag --engine"


def test_with_a_file_a_flag_for_the_engine_is_for_its_workers(config_file: ConfigFile) -> None:
    loaded = load_settings(config_file(FULL), env={}, flags={"--engine": "vllm"})

    assert {name: worker.engine.use for name, worker in loaded.settings.workers.items()} == {
        "mock": "vllm",
        "other": "vllm",
    }
