"""The settings of an engine that runs alone, as those of a worker in a config file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dynamo_core.contracts.engine import RuntimeOptions, WorkerConfig

from dynamo_runtime.settings import LoadedSettings, load_settings
from dynamo_runtime.settings.tree import Table, from_plain

#: The origin of what no layer set.
ORIGIN = "engine run alone"

#: What reaches the other processes of this machine, and needs no servers.
PLANES = {"transport": "tcp", "discovery": "file"}

#: The origin of what a program says of its worker.
TOLD = "WorkerConfig"


def worker_word(name: str) -> str:
    """Return the name of a worker in a config file, made from that of an engine."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "engine"


def load_standalone(
    worker: str,
    *,
    engine: str,
    model_name: str,
    runtime: RuntimeOptions,
    above: Table | None = None,
    env: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Return the usual layers over what an engine alone needs; `above` lies over them. `env` is the process's if None.

    Raises:
        ConfigError: one line saying where, what, and how to mend it.
    """
    needed = {section: {"use": name} for section, name in PLANES.items()}
    own = {worker: {"model": {"name": model_name}, "engine": {"use": engine}}}
    below = from_plain({**needed, "workers": own}, ORIGIN)
    planes = {
        "--discovery-backend": runtime.discovery_backend,
        "--request-plane": runtime.request_plane,
        "--event-plane": runtime.event_plane,
    }
    return load_settings(
        None if runtime.config_file is None else Path(runtime.config_file),
        profile=runtime.profile,
        env=os.environ if env is None else env,
        sets=runtime.overrides,
        flags={**runtime.flags, **{name: value for name, value in planes.items() if value is not None}},
        below=_table(below),
        above=above,
    )


def layer_of(config: WorkerConfig, model_name: str) -> Table:
    """Return what a worker config says, as a layer over all others: the engine has been told so already."""
    worker = {
        "model": {
            "name": model_name,
            "path": config.model_path,
            "migration_limit": config.migration_limit,
            "custom_jinja_template": config.custom_jinja_template,
        },
        "component": config.component,
        "endpoint": config.endpoint,
        "endpoint_types": list(config.endpoint_types),
        "disaggregation_mode": config.disaggregation_mode.value,
        "enable_kv_routing": config.enable_kv_routing,
        "enable_local_indexer": config.enable_local_indexer,
    }
    return _table(from_plain({"namespace": config.namespace, "workers": {config.worker: worker}}, TOLD))


def _table(node: object) -> Table:
    assert isinstance(node, Table)  # noqa: S101 - a mapping makes a table
    return node
