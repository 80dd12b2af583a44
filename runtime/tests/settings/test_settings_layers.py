"""Which layer wins, and what is said of where a value came from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import reduce
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


WORKER = "{model: {name: m}, engine: {use: mocker}}"
COMMON = {
    "apis": None,
    "host": "127.0.0.1",
    "processes": 1,
    "tls": {"cert": None, "key": None, "client_ca": None},
    "response_store": {"use": None},
}


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        # A layer that changes `use` drops the plugin's keys below it, and keeps common keys.
        (FULL, {"profile": "production"}, {"transport": {"use": "tcp"}}),
        (
            FULL,
            {"env": {"DYN_FRONTEND__USE": "grpc", "DYN_FRONTEND__STREAMS": "5"}},
            {"frontend": {"use": "grpc", "port": 9000, "streams": 5} | COMMON},
        ),
        (FULL, {"env": {"DYN_REQUEST_PLANE": "tcp"}}, {"transport": {"use": "tcp"}}),
        (FULL, {"flags": {"--request-plane": "tcp"}}, {"transport": {"use": "tcp"}}),
        (
            FULL,
            {"sets": ["workers.mock.engine.use=vllm"]},
            {"workers.mock.engine": {"use": "vllm"}, "workers.mock.replicas": 2},
        ),
        ("router: {threshold: 4}", {"env": {"DYN_ROUTER_MODE": "kv"}}, {"router": {"use": "kv"}}),
        ("", {"sets": ["router.use=kv", "router.seed=3"], "flags": {"--router-mode": "x"}}, {"router": {"use": "x"}}),
        # One that repeats it, or names the default, keeps them.
        (
            FULL,
            {"env": {"DYN_REQUEST_PLANE": "nats"}, "sets": ["transport.user=me"]},
            {"transport": {"use": "nats", "servers": ["nats://one"], "user": "me"}},
        ),
        (
            "router: {threshold: 4}",
            {"env": {"DYN_ROUTER_MODE": "round-robin"}},
            {"router": {"use": "round-robin", "threshold": 4}},
        ),
        (
            "",
            {"sets": ["router.seed=3"], "flags": {"--router-mode": "random"}},
            {"router": {"use": "random", "seed": 3}},
        ),
        # A flag for workers, or for their engine, is for every worker.
        (
            FULL,
            {
                "env": {"DYN_ENGINE_REQUEST_LIMIT": "8"},
                "flags": {"--migration-limit": 3, "--disaggregation-mode": "prefill"},
            },
            {
                f"workers.{worker}.{key}": value
                for worker in ("mock", "other")
                for key, value in (
                    ("engine_request_limit", 8),
                    ("model.migration_limit", 3),
                    ("disaggregation_mode", "prefill"),
                )
            },
        ),
        (
            FULL,
            {"flags": {"--engine": "vllm"}},
            {"workers.mock.engine.use": "vllm", "workers.other.engine.use": "vllm"},
        ),
        # A router's flag is for the innermost of several.
        (
            "router: {use: a, then: {use: b, then: {use: c}}}",
            {"flags": {"--router-mode": "kv"}},
            {"router": {"use": "a", "then": {"use": "b", "then": {"use": "kv"}}}},
        ),
        # Variables: the nested one wins, and they may be lower case, mappings and empty.
        ("", {"env": {"DYN_HTTP_PORT": "1", "DYN_FRONTEND__PORT": "2"}}, {"frontend.port": 2}),
        (
            f"workers: {{mock: {WORKER}}}",
            {
                "env": {
                    "dyn_workers__mock__replicas": "4",
                    "DYN_ROUTER": "{use: kv, weights: {a: 1}}",
                    "DYN_ROUTER__WEIGHTS__B": "2",
                    "DYN_NAMESPACE": "",
                }
            },
            {"workers.mock.replicas": 4, "router": {"use": "kv", "weights": {"a": 1, "b": 2}}, "namespace": "dynamo"},
        ),
        (
            "",
            {
                "env": {
                    "DYN_ROUTER_MODE": "kv",
                    "DYN_ROUTER_TEMPERATURE": "0.5",
                    "DYN_ROUTER_REPLICA_SYNC": "true",
                },
                "flags": {"--router-kv-events": False},
            },
            {"router": {"use": "kv", "temperature": 0.5, "kv_events": False}, "client.share_loads": True},
        ),
        # Names of workers may hold underscores, and the environment can add a whole worker.
        (
            f"workers: {{a: {WORKER}, a__b: {WORKER}, c_: {WORKER}}}",
            {"env": {"DYN_WORKERS__A__B__REPLICAS": "2", "DYN_WORKERS__C___REPLICAS": "3"}},
            {"workers.a.replicas": 1, "workers.a__b.replicas": 2, "workers.c_.replicas": 3},
        ),
        (
            "",
            {
                "env": {
                    "DYN_WORKERS__GPU__ENGINE__USE": "vllm",
                    "DYN_WORKERS__GPU__MODEL__NAME": "m",
                    "DYN_MIGRATION_LIMIT": "2",
                }
            },
            {"workers.gpu.engine.use": "vllm", "workers.gpu.model.migration_limit": 2},
        ),
        # A section with nothing in it changes nothing.
        (
            "log:\nfrontend:\nprofiles:\n  quiet:\n    log:\n",
            {"profile": "quiet"},
            {"log.level": "info", "frontend.port": 8000},
        ),
        # What looks like a number or a bool may be meant as words.
        (
            "workers: {mock: {model: {name: 1_000, path: no}, engine: {use: 7}}}",
            {"env": {"DYN_NAMESPACE": "0123", "DYN_METRICS_PREFIX": "on"}},
            {
                "workers.mock.model.name": "1_000",
                "workers.mock.model.path": "no",
                "workers.mock.engine.use": "7",
                "namespace": "0123",
                "http.metrics_prefix": "on",
            },
        ),
        # The environment names the file and the profile if nothing else does.
        (None, {"env": {"DYN_CONFIG": "full.yaml", "DYN_PROFILE": "production"}}, {"transport": {"use": "tcp"}}),
        ("namespace: second", {"env": {"DYN_CONFIG": "full.yaml"}}, {"namespace": "second"}),
    ],
)
def test_layers_make_these_settings(
    config_file: ConfigFile, text: str | None, layers: dict[str, Any], expected: dict[str, Any]
) -> None:
    config_file(FULL, "full.yaml")

    loaded = load_settings(None if text is None else config_file(text), **({"env": {}} | layers))

    shown = loaded.dump(redact=False)
    found = {key: reduce(lambda node, part: node[part], key.split("."), shown) for key in expected}
    assert found == expected


@pytest.mark.parametrize(("text", "level"), [("warn", "warning"), ("INFO", "info")])
def test_modes_and_levels_may_be_written_as_people_write_them(text: str, level: str) -> None:
    loaded = load_settings(
        env={"DYN_DISAGGREGATION_MODE": " Aggregated ", "DYN_LOG": text, "DYN_LOGGING_JSONL": "1"},
        sets=["workers.mock.endpoint_types=chat,embeddings"],
    )

    worker, log = loaded.settings.workers["mock"], loaded.settings.log
    assert (worker.disaggregation_mode, worker.endpoint_types) == ("agg", ("chat", "embeddings"))
    assert (log.level, log.json_lines) == (level, True)


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


@pytest.mark.parametrize("name", PROCESS_NAMES)
def test_a_variable_that_is_for_the_command_is_not_taken_for_a_setting(config_file: ConfigFile, name: str) -> None:
    path = config_file(FULL, "whole.yaml")
    value = str(path) if name == "DYN_CONFIG" else "production"

    with_it = load_settings(path, env={name: value})

    assert with_it.settings.workers.keys() == load_settings(path, env={}).settings.workers.keys()


def test_the_modes_are_those_of_the_engine_contract() -> None:
    for mode in DisaggregationMode:
        loaded = load_settings(env={}, flags={"--disaggregation-mode": mode.value})

        assert DisaggregationMode(loaded.settings.workers["mock"].disaggregation_mode) is mode


def test_a_settings_dump_is_a_copy_and_loads_as_the_same_settings(config_file: ConfigFile) -> None:
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
def test_merged_trees_have_the_last_value_of_every_path(layers: list[dict[str, Any]]) -> None:
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


def test_without_a_file_a_flag_for_the_engine_makes_one_worker_that_is_called_as_the_engine() -> None:
    loaded = load_settings(env={}, sets=["workers.my_engine.engine.depth=2"], flags={"--engine": "my-engine"})

    [(name, worker)] = loaded.settings.workers.items()
    assert (name, worker.engine.use, worker.engine.options) == ("my_engine", "my-engine", {"depth": 2})
    assert worker.model.name == "my-engine-model"
    assert loaded.origin("workers.my_engine.engine.use") == "flag --engine"
