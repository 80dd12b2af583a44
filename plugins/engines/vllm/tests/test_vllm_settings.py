"""The settings, what vLLM is given of them, and what is said where vLLM is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import BackendError, DisaggregationMode, WorkerConfig
from dynamo_core.errors import ConfigError
from dynamo_plugin_engine_vllm import library
from dynamo_plugin_engine_vllm.arguments import (
    CPU_CACHE,
    Endpoints,
    engine_arguments,
    events_arguments,
    transfer_arguments,
    with_config_objects,
)
from dynamo_plugin_engine_vllm.config import REFUSED, VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_plugin_engine_vllm.side_channel import side_channel
from pydantic import ValidationError

WORKER = WorkerConfig(model_name="m", model_path="/models/m", worker="w")
KNOWN = frozenset({"swap_space", "max_loras"})
README = (Path(__file__).parents[1] / "README.md").read_text()


def given(on_cpu: bool = False, **settings: Any) -> dict[str, Any]:
    return engine_arguments(VllmConfig(**settings), WORKER, on_cpu=on_cpu, known=KNOWN)


def test_only_set_values_are_passed_to_vllm() -> None:
    arguments = given(max_model_len=128, tensor_parallel_size=2, args={"swap_space": 1})

    assert arguments.items() >= {"model": "/models/m", "max_model_len": 128, "swap_space": 1}.items()
    assert arguments["tensor_parallel_size"] == 2
    assert "block_size" not in arguments
    assert "kv_cache_memory_bytes" not in arguments


def test_vllm_chooses_prefix_caching_of_a_pooling_model_unless_it_is_set() -> None:
    assert given()["enable_prefix_caching"] is True
    assert "enable_prefix_caching" not in given(runner="pooling")
    assert given(runner="pooling", enable_prefix_caching=False)["enable_prefix_caching"] is False


def test_the_cpu_cache_has_a_bounded_default_size() -> None:
    assert given(on_cpu=True)["kv_cache_memory_bytes"] == CPU_CACHE
    assert given(on_cpu=True, kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_would_break_the_engine_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot be set: "):
        VllmConfig(args={name: True})


def test_a_setting_cannot_be_given_twice() -> None:
    with pytest.raises(ValidationError, match="block_size is a setting of its own"):
        VllmConfig(args={"block_size": 32})


def test_an_argument_that_vllm_does_not_know_is_named_with_a_guess() -> None:
    with pytest.raises(BackendError.InvalidArgument, match=r"args\.swap_spice .* did you mean swap_space"):
        given(args={"swap_spice": 1})


def test_only_workers_that_prefill_publish_kv_events() -> None:
    endpoints = Endpoints.in_folder(Path("/run/x"))
    decode = WorkerConfig(disaggregation_mode=DisaggregationMode.DECODE)

    told = events_arguments(VllmConfig(), WORKER, endpoints)

    assert told is not None
    assert told["endpoint"].startswith("ipc:///run/x/")
    assert events_arguments(VllmConfig(), decode, endpoints) is None
    assert events_arguments(VllmConfig(enable_prefix_caching=False), WORKER, endpoints) is None
    assert events_arguments(VllmConfig(), WorkerConfig(enable_kv_routing=False), endpoints) is None


@pytest.mark.parametrize(
    ("mode", "role"), [(DisaggregationMode.PREFILL, "kv_producer"), (DisaggregationMode.DECODE, "kv_consumer")]
)
def test_the_two_halves_have_a_connector(mode: DisaggregationMode, role: str) -> None:
    arguments = transfer_arguments(VllmConfig(), WorkerConfig(disaggregation_mode=mode), on_cpu=True)

    assert arguments is not None
    assert (arguments["kv_connector"], arguments["kv_role"]) == ("NixlConnector", role)
    assert arguments["kv_buffer_device"] == "cpu"


def test_a_whole_worker_has_none() -> None:
    assert transfer_arguments(VllmConfig(), WORKER, on_cpu=True) is None


def test_replicas_and_their_ranks_have_ports_of_their_own_for_nixl() -> None:
    ports = [
        side_channel("10.0.0.1", 5600, replica=replica, ranks=2)["VLLM_NIXL_SIDE_CHANNEL_PORT"] for replica in range(3)
    ]

    assert ports == ["5600", "5602", "5604"]
    assert int(side_channel("127.0.0.1", 0, replica=0, ranks=2)["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_one_line_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as refused:
        VllmEngine(VllmConfig(), WORKER)

    assert str(refused.value).startswith("engine vllm: vLLM is not installed: pip install ")
    assert "[vllm]" in str(refused.value)
    assert "[cpu]" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_worker_without_a_model_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "check_installed", lambda: None)

    with pytest.raises(ConfigError, match=r"workers\.w\.model\.path is missing"):
        VllmEngine(VllmConfig(), WorkerConfig(model_name="m", worker="w"))


@pytest.mark.parametrize("name", VllmConfig.model_fields)
def test_every_setting_is_in_the_readme(name: str) -> None:
    assert f"| `{name}` |" in README


@dataclasses.dataclass
class Backend:
    name: str = "auto"


@dataclasses.dataclass
class Args:
    backend: Backend = dataclasses.field(default_factory=Backend)
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 1


def test_mappings_in_the_config_file_become_vllms_own_config_objects_where_it_has_such() -> None:
    given = {"backend": {"name": "xgrammar"}, "overrides": {"a": 1}, "size": 2}

    assert with_config_objects(given, Args.__dataclass_fields__) == {**given, "backend": Backend("xgrammar")}
    with pytest.raises(BackendError.InvalidArgument, match=r"args\.backend: .*unknown"):
        with_config_objects({"backend": {"unknown": 1}}, Args.__dataclass_fields__)
