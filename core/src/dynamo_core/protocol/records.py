"""Records in discovery: instances, model cards, event sources. Names of files only, never paths; JSON on the wire.

Keys: ``v1/instances/<namespace>/<component>/<endpoint>/<id hex>`` and ``v1/mdc/<…>`` for the card of the same worker;
``v1/frontends/<namespace>/<id hex>`` for a frontend.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

#: Version of records and frames.
PROTO = 1
#: The versions that a process understands: its own, and from the second on the one before.
ACCEPTED_PROTOS: Final = (PROTO,)

INSTANCES = "v1/instances/"
CARDS = "v1/mdc/"
EVENT_SOURCES = "v1/event_sources/"
FRONTENDS = "v1/frontends/"

AGGREGATED = "aggregated"
PREFILL = "prefill"
DECODE = "decode"

#: The request types of a model.
CHAT = "chat"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"

#: What `Instance.state` may be. A worker in any state but the first gets no new requests.
SERVING = ""
CORDONED = "cordoned"
DRAINING = "draining"
WORKER_STATES = (SERVING, CORDONED, DRAINING)


class Instance(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """One worker process (or one worker inside this process) that serves endpoints.

    `address` is what its transport published, by transport name; `worker` is the name in the config file, `replica`
    which of its processes this is; `pid` and `host` tell an operator where it runs. `lease_ttl` is the life of the
    worker's lease in seconds, None if it does not say: callers tolerate its silence for that long. `state` is one of
    `WORKER_STATES`, as an operator has set it. `version` is that of the framework, `started` the Unix time since which
    it serves; empty and 0 if it does not say.
    """

    instance_id: int
    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"
    worker: str = ""
    address: dict[str, str] = {}
    pid: int | None = None
    host: str = ""
    system_url: str | None = None
    proto: int = PROTO
    lease_ttl: float | None = None
    replica: int = 0
    state: str = SERVING
    version: str = ""
    started: float = 0.0

    @property
    def path(self) -> str:
        """``namespace/component/endpoint/id``, the part of the key that all records of this worker share."""
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"

    @property
    def state_name(self) -> str:
        """`state` for people: ``serving``, ``cordoned`` or ``draining``."""
        return self.state or "serving"


class RuntimeConfig(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Facts of the running engine; capacities are per data-parallel rank."""

    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    #: Why these parsers, or why none, for people.
    tool_call_parser_reason: str = ""
    reasoning_parser_reason: str = ""
    enable_local_indexer: bool = True
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    runtime_data: dict[str, Any] = {}


class ModelFile(msgspec.Struct, frozen=True):
    """A file of the model folder that the worker serves: its bare name, size in bytes, and SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class ModelFileRequest(msgspec.Struct, frozen=True):
    """The bare name of a file that the model's card lists."""

    name: str


class ModelFileChunk(msgspec.Struct, frozen=True, gc=False):
    """The next bytes of the file, in order, without gaps."""

    data: bytes


class WorkerStateRequest(msgspec.Struct, frozen=True):
    """The state that the worker is to take, one of `WORKER_STATES`; None only asks."""

    state: str | None = None


class WorkerStateReport(msgspec.Struct, frozen=True):
    """The state that a worker is in, and its running and queued requests of all frontends.

    `drained`: it has none, and its state has been out of service for so long that no caller sends it any.
    """

    state: str
    requests: int
    drained: bool


class ModelCard(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """All that a frontend must know about a model to serve it. Workers of one model must agree on `checksum`."""

    name: str
    instance_id: int
    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"
    #: Its request types: any of chat, completions, embeddings, score, rerank. Empty for prefill workers.
    model_types: list[str] = []
    #: "tokens" or "text".
    model_input: str = "tokens"
    worker_type: str = AGGREGATED
    #: "bytes", or "hf" when `files` hold a Hugging Face tokenizer.
    tokenizer: str = "bytes"
    files: list[ModelFile] = []
    checksum: str = ""
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    migration_limit: int = 0
    capabilities: list[str] = []
    runtime_config: RuntimeConfig = RuntimeConfig()
    proto: int = PROTO
    #: Roles that it needs beside its own: all of any one list. Empty if it serves alone.
    needs: list[list[str]] = []
    #: The hash scheme of the blocks in its events; None if it does not say. `dynamo_core.kv.hashes.SCHEME` is ours.
    kv_hashing: str | None = None

    @property
    def path(self) -> str:
        """``namespace/component/endpoint/id``, as `Instance.path`."""
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"


class EventSource(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """The address of one publisher's events on one subject."""

    subject: str
    source: int
    address: dict[str, str] = {}
    proto: int = PROTO


class FrontendRecord(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """One frontend process. `address` is for calls of other frontends; see `Instance` for fields of the same names.

    `version` is that of its distribution ``dynamo-core``; `replica` tells it from others of the same port.
    """

    frontend_id: int
    namespace: str = "dynamo"
    address: dict[str, str] = {}
    pid: int | None = None
    host: str = ""
    version: str = ""
    replica: int | None = None
    proto: int = PROTO
    lease_ttl: float | None = None

    @property
    def path(self) -> str:
        """``namespace/id``, the last part of its key."""
        return f"{self.namespace}/{self.frontend_id:x}"


class PeerRequest(msgspec.Struct, frozen=True):
    """A call of a frontend by another one. `payload` is MessagePack."""

    name: str
    payload: bytes


class PeerReplyPart(msgspec.Struct, frozen=True, gc=False):
    """The next bytes of the reply, which is MessagePack, in order, without gaps."""

    data: bytes


class RequestRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One finished client request, the argument of `dynamo_request_finished`. Times in seconds; no prompts or keys.

    The client alone vouches for `user` and `session`; they may identify a person, and the access log leaves them out.
    """

    #: The id of the request.
    request_id: str
    #: The model, and the API: `chat_completions`, `completions`, `embeddings`, `score`, `rerank`, …
    model: str
    endpoint: str
    #: `stream` or `unary`.
    request_type: str
    #: `success` or `error`.
    status: str
    #: Empty on success; else one of the `error_type` values of the request metrics.
    error_type: str
    #: The status that the client saw.
    http_status: int
    #: Counts of tokens.
    prompt_tokens: int
    output_tokens: int
    #: Seconds of all of it.
    duration: float
    #: Seconds until the first token; None without one.
    time_to_first_token: float | None
    #: Why the answer ended; None if it did not.
    finish_reason: str | None
    #: The worker that answered; None if none did.
    instance_id: int | None
    #: The place in a trace.
    trace_id: str
    span_id: str
    #: The id that the client sent; None without one.
    x_request_id: str | None
    #: The name of the API key, never the key; empty where no keys are configured.
    key_id: str = ""
    #: The tenant of the key.
    tenant: str = "default"
    #: The end user and the session that the client names; empty without. The client alone vouches for them, and they
    #: may identify a person: do not log them.
    user: str = ""
    session: str = ""
    #: Prompt tokens that the engine found in its cache; None if it did not say.
    cached_tokens: int | None = None
