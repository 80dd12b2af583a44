"""From the settings to the arguments of vLLM's `AsyncEngineArgs`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_core import BackendError, DisaggregationMode, WorkerConfig

from dynamo_plugin_engine_vllm.config import VllmConfig

#: The KV cache on a CPU, in bytes, unless set. vLLM would take nearly all of the memory.
CPU_CACHE = 1 << 30

#: Settings that are vLLM's own, by the same name.
_SAME_NAMES = (
    "max_model_len",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enforce_eager",
    "trust_remote_code",
    "seed",
    "runner",
    "scheduling_policy",
)

_ROLES = {DisaggregationMode.PREFILL: "kv_producer", DisaggregationMode.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints where vLLM publishes its events: its own names, of rank 0."""

    events: str
    replay: str

    @classmethod
    def in_folder(cls, folder: Path) -> Endpoints:
        """Return sockets in a folder: no port is open, and none can be taken.

        The word `inproc` in their names makes vLLM give each further rank a name of its own, which it otherwise does
        for TCP ports only.
        """
        return cls(f"ipc://{folder}/inproc-events", f"ipc://{folder}/inproc-replay")


def engine_arguments(
    settings: VllmConfig, worker: WorkerConfig, *, on_cpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """Return everything but events and KV transfer, which are objects of vLLM's.

    Raises:
        BackendError.InvalidArgument: `args` has a name that is not among those `known` to this vLLM.
    """
    arguments: dict[str, Any] = {"model": worker.model_path, "served_model_name": worker.model_name or None}
    for name in _SAME_NAMES:
        value = getattr(settings, name)
        if value is not None:
            arguments[name] = value
    if settings.runner == "pooling" and settings.enable_prefix_caching:
        # Models that keep no KV cache do not start with it; vLLM knows which.
        del arguments["enable_prefix_caching"]
    if on_cpu:
        arguments.setdefault("kv_cache_memory_bytes", CPU_CACHE)
    for name, value in settings.args.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BackendError.InvalidArgument(f"engine vllm: args.{name} is no argument of this vLLM{meant}")
        arguments[name] = value
    return arguments


def with_config_objects(arguments: dict[str, Any], fields: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """Return the arguments with mappings in place of vLLM's own config objects made such objects.

    Raises:
        BackendError.InvalidArgument: such an object cannot be made of one.
    """
    made = dict(arguments)
    for name, value in arguments.items():
        factory = fields[name].default_factory
        if isinstance(value, dict) and factory is not dataclasses.MISSING:
            kind = type(factory())
            if dataclasses.is_dataclass(kind):
                try:
                    made[name] = kind(**value)
                except Exception as error:
                    # Of several kinds: what vLLM checks, what pydantic does, names that are not there.
                    raise BackendError.InvalidArgument(f"engine vllm: args.{name}: {error}", cause=error) from error
    return made


def events_arguments(settings: VllmConfig, worker: WorkerConfig, endpoints: Endpoints) -> dict[str, Any] | None:
    """Return arguments of `KVEventsConfig`; None if the cache is not published."""
    told = settings.enable_prefix_caching and worker.enable_kv_routing and settings.runner != "pooling"
    if not told or worker.disaggregation_mode is DisaggregationMode.DECODE:
        # The cache of a decode worker saves no work: prompts are computed elsewhere.
        return None
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints.events,
        "replay_endpoint": endpoints.replay,
    }


def transfer_arguments(settings: VllmConfig, worker: WorkerConfig, *, on_cpu: bool) -> dict[str, Any] | None:
    """Return arguments of `KVTransferConfig`; None for a worker that is whole."""
    role = _ROLES.get(worker.disaggregation_mode)
    if role is None:
        return None
    device = settings.kv_buffer_device or ("cpu" if on_cpu else None)
    return {
        "kv_connector": settings.kv_connector,
        "kv_role": role,
        "kv_load_failure_policy": settings.kv_load_failure,
        **({"kv_buffer_device": device} if device else {}),
    }
