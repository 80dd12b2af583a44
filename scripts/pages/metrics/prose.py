"""The words beside the metrics: the groups with a sentence each, and the meanings of labels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """A heading, the sentence below it, and the modules whose metrics it has, or functions and classes in them."""

    title: str
    sentence: str
    places: tuple[str, ...]


#: In the order of the page. The longest place that fits a declaration has it.
GROUPS = (
    Group(
        "Requests",
        "Requests of clients, over every API. One for an unknown model is only in `dynamo_frontend_failures_total`.",
        ("dynamo_runtime.telemetry.request_accounting",),
    ),
    Group(
        "Stages of a request",
        "The way of a request until a worker has accepted it.",
        ("dynamo_runtime.telemetry.stages",),
    ),
    Group(
        "Migration",
        "Requests whose worker failed: [Migration](../explanation/migration.md).",
        ("dynamo_runtime.dispatch.execution.migrate",),
    ),
    Group(
        "Models and workers",
        "What a frontend sees at each scrape. A figure that the model card or the worker does not give has no line.",
        ("dynamo_runtime.dispatch.models.gauges",),
    ),
    Group(
        "The frontend's process",
        "Its event loop, its callers and its neighbours. `dynamo_frontend_load_peers` is there "
        "[where frontends share loads](../how-to/several-frontends.md).",
        (
            "dynamo_runtime.telemetry.loop_lag",
            "dynamo_runtime.assembly.frontend_composition",
            "dynamo_runtime.assembly.frontend_listeners",
            "dynamo_runtime.dispatch.unread_answers",
            "dynamo_http.body_budget",
        ),
    ),
    Group(
        "Prompts and answers",
        "What an API does before a worker is chosen, and with the answers.",
        ("dynamo_generation", "dynamo_plugin_frontend_openai"),
    ),
    Group(
        "Remembered prompts",
        "Tokens that the frontend remembers, unless `client.token_cache_mb` is 0.",
        ("dynamo_generation.prompts.token_cache",),
    ),
    Group(
        "Response store",
        "Only with `frontend.response_store`: [Responses with memory](../how-to/responses-with-memory.md).",
        ("dynamo_plugin_frontend_responses.memory",),
    ),
    Group(
        "Router kv",
        "Only with the router [`kv`](../explanation/kv-routing.md).",
        ("dynamo_plugin_router_kv",),
    ),
    Group(
        "Router affinity",
        "Only with the router [`affinity`](../how-to/sticky-sessions.md).",
        ("dynamo_plugin_router_affinity",),
    ),
    Group(
        "Router slot-tracker",
        "Only with the router [`slot-tracker`](slot-tracker.md).",
        ("dynamo_plugin_router_slot_tracker.router",),
    ),
    Group(
        "Admission fair-queue",
        "Only with the admission [`fair-queue`](../how-to/fair-queue.md). Where `admission` lists a plugin twice, its "
        "metrics have the label `entry` too.",
        ("dynamo_plugin_admission_fair_queue",),
    ),
    Group(
        "Admission rate-limit",
        "Only with the admission [`rate-limit`](../how-to/rate-limits.md).",
        ("dynamo_plugin_admission_rate_limit",),
    ),
    Group(
        "Limits over several frontends",
        "Only with `shared` in the settings of `fair-queue` or `rate-limit`.",
        (
            "dynamo_plugin_admission_fair_queue.meters.SharingMeters",
            "dynamo_plugin_admission_rate_limit.meters.Meters.stale",
        ),
    ),
    Group(
        "Extension feed",
        "Only with the extension [`feed`](../how-to/see-what-happens.md).",
        ("dynamo_plugin_extension_feed",),
    ),
    Group(
        "Workers",
        "The requests of a worker, whatever its engine, and how long the [steps of its life](worker.md) took.",
        ("dynamo_runtime.worker.metrics",),
    ),
    Group(
        "Places in the engine",
        "What [`engine_request_limit`](../how-to/request-rejection.md) bounds.",
        ("dynamo_runtime.worker.capacity_gate",),
    ),
    Group("Engine mocker", "Only of workers with the engine `mocker`.", ("dynamo_plugin_engine_mocker",)),
    Group(
        "Engine vllm",
        "Only of workers with the engine `vllm`, beside vLLM's own metrics.",
        ("dynamo_plugin_engine_vllm",),
    ),
    Group(
        "Event plane",
        "What processes tell each other, over any transport.",
        (
            "dynamo_plugin_transport_inproc.events",
            "dynamo_plugin_transport_tcp.events",
            "dynamo_wire.brokered.events",
        ),
    ),
    Group("Transport tcp", "Only with the transport `tcp`.", ("dynamo_plugin_transport_tcp.transport",)),
    Group(
        "Transports nats and redis",
        "Only with the transport, or the event plane, that the name has.",
        ("dynamo_wire.brokered.broker", "dynamo_plugin_transport_nats", "dynamo_plugin_transport_redis"),
    ),
    Group(
        "Slot tracker",
        "Only of [`dynamo slot-tracker --metrics`](slot-tracker.md), and of replicas only with `--replica-sync-bind`.",
        ("dynamo_plugin_router_slot_tracker.metrics",),
    ),
)

LABELS = {
    "bound": "the bound that an answer met",
    "class": "the kind of an error, such as `InvalidRequest` or `CapacityExhausted`",
    "dp_rank": "the data-parallel rank; `any` where the worker has several and the frontend does not know which it was",
    "dynamo_component": "the component of the worker",
    "dynamo_endpoint": "the endpoint of the worker",
    "dynamo_namespace": "the namespace of the worker",
    "endpoint": "the API, such as `chat_completions` or `responses`",
    "error_type": "what went wrong, in the words of [the access log](api.md#the-access-log)",
    "event_type": "the kind of an event",
    "extension": "the extension that reads the events",
    "kind": "the kind of what is counted",
    "limit": "the limit that was reached",
    "listener": "`public` or `admin`",
    "migration_type": "whether the answer had begun",
    "model": "the model; beyond 1,000, requests are those of `other`",
    "operation": "what was done",
    "outcome": "how it ended",
    "phase": "the role of the worker to be found: `aggregated`, `prefill` or `decode`",
    "policy_class": "the order of the queue: `fcfs` or `wspt`",
    "priority": "the priority of requests",
    "reason": "the reason",
    "request_type": "`stream` or `unary`",
    "route": "the path of a call",
    "router_id": "the router: a random number for each pool and start",
    "router_worker_id": "the `router_id` of the router that can choose the rank",
    "rule": "the `name` of a rule of the limits",
    "side": "`caller`: connections that the process opened; `listener`: those that it accepted",
    "source": "where a decision came from",
    "stage": "the stage of a request",
    "state": "the state of a worker",
    "status": "how it ended",
    "subject": "the subject of the events",
    "tenant": "the tenant; beyond 64, `other`. `fair-queue` names those of its settings and 64 more, and `(others)`",
    "tenant_id": "the tenant that a caller of the slot tracker names",
    "warning_kind": "the kind of a warning",
    "worker": "the name and the replica of the worker, such as `mock-0`",
    "worker_id": "the id of the worker: 16 hexadecimal digits, as in the logs",
    "worker_type": "the role of the worker: `aggregated`, `prefill` or `decode`",
}
