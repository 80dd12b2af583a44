"""The records that a worker registers."""

from __future__ import annotations

import hashlib
import os
import socket
import time

import msgspec
from dynamo_core.contracts.engine import EMBED, RERANK, SCORE, DisaggregationMode, EngineConfig, WorkerConfig
from dynamo_core.contracts.model_folder import TOKENIZER
from dynamo_core.kv.hashes import SCHEME
from dynamo_core.protocol.records import (
    AGGREGATED,
    DECODE,
    EMBEDDINGS,
    PREFILL,
    Instance,
    ModelCard,
    ModelFile,
    RuntimeConfig,
)
from importlib_metadata import version

from dynamo_runtime.worker.parser_choice import NO_CHOICE, ParserChoice

_WORKER_TYPE = {
    DisaggregationMode.AGGREGATED: AGGREGATED,
    DisaggregationMode.PREFILL: PREFILL,
    DisaggregationMode.DECODE: DECODE,
}


#: The request types that go with capabilities.
_TYPES = {EMBED: EMBEDDINGS, SCORE: SCORE, RERANK: RERANK}

#: What a worker of each role cannot serve without.
_NEEDS = {
    DisaggregationMode.AGGREGATED: [],
    DisaggregationMode.PREFILL: [[DECODE]],
    DisaggregationMode.DECODE: [[PREFILL]],
}


def public_name(worker: WorkerConfig, engine: EngineConfig) -> str:
    """Return the name under which clients ask for the model."""
    return worker.served_model_name or worker.model_name or engine.served_model_name or engine.model


def make_card(
    instance_id: int,
    worker: WorkerConfig,
    engine: EngineConfig,
    files: list[ModelFile],
    parsers: ParserChoice = NO_CHOICE,
) -> ModelCard:
    """Return the model card of one worker. Its checksum covers what all workers of a model must agree on."""
    mode = worker.disaggregation_mode
    types = [] if mode is DisaggregationMode.PREFILL else list(worker.endpoint_types)
    if types:
        types += [name for it, name in _TYPES.items() if it in engine.capabilities and name not in types]
    tokenizer = "hf" if any(file.name == TOKENIZER for file in files) else "bytes"
    agreed = {
        "files": [(file.name, file.sha256) for file in files],
        "tokenizer": tokenizer,
        "model_input": engine.model_input,
        "context_length": engine.context_length,
        "kv_cache_block_size": engine.kv_cache_block_size,
    }
    return ModelCard(
        name=public_name(worker, engine),
        instance_id=instance_id,
        namespace=worker.namespace,
        component=worker.component,
        endpoint=worker.endpoint,
        model_types=types,
        model_input=engine.model_input,
        worker_type=_WORKER_TYPE[mode],
        tokenizer=tokenizer,
        files=files,
        checksum=hashlib.sha256(msgspec.json.encode(agreed, order="sorted")).hexdigest(),
        context_length=engine.context_length,
        kv_cache_block_size=engine.kv_cache_block_size,
        migration_limit=worker.migration_limit,
        capabilities=sorted(engine.capabilities),
        runtime_config=RuntimeConfig(
            total_kv_blocks=engine.total_kv_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            data_parallel_size=engine.data_parallel_size,
            data_parallel_start_rank=engine.data_parallel_start_rank,
            tool_call_parser=parsers.tools.name,
            tool_call_parser_reason=parsers.tools.reason,
            reasoning_parser=parsers.reasoning.name,
            reasoning_parser_reason=parsers.reasoning.reason,
            enable_local_indexer=worker.enable_local_indexer and mode is not DisaggregationMode.DECODE,
            bootstrap_host=engine.bootstrap_host,
            bootstrap_port=engine.bootstrap_port,
            runtime_data=engine.runtime_data,
        ),
        needs=_NEEDS[mode],
        kv_hashing=SCHEME if engine.kv_cache_block_size is not None else None,
    )


def make_instance(
    instance_id: int,
    worker: WorkerConfig,
    address: dict[str, str],
    system_url: str | None = None,
    lease_ttl: float | None = None,
) -> Instance:
    """Return the instance record of one worker in this process; `lease_ttl` in seconds."""
    return Instance(
        instance_id=instance_id,
        namespace=worker.namespace,
        component=worker.component,
        endpoint=worker.endpoint,
        worker=worker.worker,
        address=address,
        pid=os.getpid(),
        host=socket.gethostname(),
        system_url=system_url,
        lease_ttl=lease_ttl,
        replica=worker.replica,
        version=version("dynamo-core"),
        started=time.time(),
    )
