"""The one table of command-line flags and flat environment names, and the keys they set.

It is plain data and imports nothing heavy: the command line reads it to make its options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

ValueType: TypeAlias = type[str] | type[int] | type[bool]

#: Variables that begin with ``DYN_`` but steer the process rather than set a key.
PROCESS_NAMES: tuple[str, ...] = ("DYN_CONFIG", "DYN_PROFILE", "DYN_STREAM_VALIDATOR", "DYN_SUPERVISOR_FD")


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting's short names. A key ``workers.*.x`` stands for that key of every worker.

    `flag` is None for settings that have a flat environment name only, `env` is None for those that have a flag only.
    """

    flag: str | None
    env: str | None
    key: str
    type: ValueType
    help: str

    @property
    def env_only(self) -> bool:
        """Whether the command line has no such option."""
        return self.flag is None

    @property
    def path(self) -> tuple[str, ...]:
        """The key as a path; ``*`` stands for every worker."""
        return tuple(self.key.split("."))


FLAGS: tuple[Flag, ...] = (
    Flag("--http-host", "DYN_HTTP_HOST", "frontend.host", str, "Address that the frontend listens on."),
    Flag("--http-port", "DYN_HTTP_PORT", "frontend.port", int, "Port that the frontend listens on; 0 for a free one."),
    Flag("--namespace", "DYN_NAMESPACE", "namespace", str, "Namespace that frontends and workers meet in."),
    Flag("--router-mode", "DYN_ROUTER_MODE", "router.use", str, "The router plugin."),
    Flag("--admission-control", None, "admission.use", str, "The admission plugin; none admits everything."),
    Flag("--discovery-backend", "DYN_DISCOVERY_BACKEND", "discovery.use", str, "The discovery plugin."),
    Flag("--request-plane", "DYN_REQUEST_PLANE", "transport.use", str, "The transport plugin."),
    Flag("--event-plane", "DYN_EVENT_PLANE", "events.use", str, "The event plane; the transport's own if not set."),
    Flag(
        "--engine-request-limit",
        "DYN_ENGINE_REQUEST_LIMIT",
        "workers.*.engine_request_limit",
        int,
        "Requests that run in one worker at once; more wait or are refused.",
    ),
    Flag(
        None,
        "DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        "workers.*.request_queue_limit",
        int,
        "Requests that wait in one worker once the engine is full.",
    ),
    Flag(
        "--migration-limit",
        "DYN_MIGRATION_LIMIT",
        "workers.*.model.migration_limit",
        int,
        "How often a request may move to another worker; 0 for never.",
    ),
    Flag(
        "--disaggregation-mode",
        "DYN_DISAGGREGATION_MODE",
        "workers.*.disaggregation_mode",
        str,
        "The role of the workers: agg, prefill or decode.",
    ),
    Flag("--model-name", "DYN_MODEL_NAME", "workers.*.model.name", str, "The model's public name."),
    Flag("--model-path", "DYN_MODEL_PATH", "workers.*.model.path", str, "The model's folder."),
    Flag("--metrics-prefix", "DYN_METRICS_PREFIX", "http.metrics_prefix", str, "Prefix of the frontend's metrics."),
    Flag(None, "DYN_HTTP_BODY_LIMIT_MB", "http.body_limit_mb", int, "Largest request body, in MB."),
    Flag("--log-level", "DYN_LOG", "log.level", str, "Log level: debug, info, warning or error."),
    Flag(None, "DYN_LOGGING_JSONL", "log.json", bool, "Write the log as JSON lines."),
)
