"""The one table of command-line flags and flat environment names, and the keys they set.

It imports nothing heavy, and no plugin: the command line reads it to make its options. The plugins declare the flags of
their own keys, in a file beside their packages, and every flag is accepted whichever plugin the config picks.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from importlib_metadata import entry_points

log = logging.getLogger(__name__)

ValueType: TypeAlias = type[str] | type[int] | type[float] | type[bool]

#: The flags of a plugin, in the folder of its package: tables ``[[flag]]`` with the fields of `Flag`.
FLAG_FILE = "flags.toml"
#: The forms of its texts. Options of commands that are not in the table are single words, so flags of plugins have two.
_KEY = re.compile(r"\w+(\.[\w*]+)+")
_FLAG = re.compile(r"--[a-z0-9]+(-[a-z0-9]+)+")
_ENV = re.compile(r"DYN_[A-Z0-9_]+")
_TYPES: dict[str, ValueType] = {"str": str, "int": int, "float": float, "bool": bool}

#: Variables that begin with ``DYN_`` but steer the process rather than set a key.
PROCESS_NAMES: tuple[str, ...] = (
    "DYN_CONFIG",
    "DYN_PROFILE",
    "DYN_ADMIN_URL",
    "DYN_ADMIN_TOKEN",
    "DYN_STREAM_VALIDATOR",
    "DYN_SUPERVISOR_FD",
)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting's short names. A key ``workers.*.x`` stands for that key of every worker.

    `flag` is None for settings that have a flat environment name only, `env` is None for those that have a flag only.
    With `lenient` a variable that is no number is logged and ignored, and one below zero is zero.
    """

    flag: str | None
    env: str | None
    key: str
    type: ValueType
    help: str
    lenient: bool = False

    @property
    def env_only(self) -> bool:
        """Whether the command line has no such option."""
        return self.flag is None

    @property
    def path(self) -> tuple[str, ...]:
        """The key as a path; ``*`` stands for every worker."""
        return tuple(self.key.split("."))


#: The flags of the keys that the runtime knows.
OWN_FLAGS: tuple[Flag, ...] = (
    Flag("--http-host", "DYN_HTTP_HOST", "frontend.host", str, "Address that the frontend listens on."),
    Flag("--http-port", "DYN_HTTP_PORT", "frontend.port", int, "Port that the frontend listens on; 0 for a free one."),
    Flag("--namespace", "DYN_NAMESPACE", "namespace", str, "Namespace that frontends and workers meet in."),
    Flag("--router-mode", "DYN_ROUTER_MODE", "router.use", str, "The router plugin."),
    Flag(
        "--router-replica-sync",
        "DYN_ROUTER_REPLICA_SYNC",
        "client.share_loads",
        bool,
        "Frontends share the load that they have placed on workers.",
    ),
    Flag(
        "--router-min-initial-workers",
        "DYN_ROUTER_MIN_INITIAL_WORKERS",
        "client.min_initial_workers",
        int,
        "Workers that a model needs before /ready says 200.",
    ),
    Flag(
        "--admission-control",
        "DYN_ADMISSION_CONTROL",
        "admission.use",
        str,
        "The admission plugin; none admits everything.",
    ),
    Flag(
        "--active-decode-blocks-threshold",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        "admission.active_decode_blocks_threshold",
        float,
        "Share of its KV blocks above which a worker is busy.",
    ),
    Flag(
        "--active-prefill-tokens-threshold",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        "admission.active_prefill_tokens_threshold",
        int,
        "Prompt tokens yet to be computed above which a worker is busy.",
    ),
    Flag(
        "--active-prefill-tokens-threshold-frac",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        "admission.active_prefill_tokens_threshold_frac",
        float,
        "The same, as a multiple of the engine's max_num_batched_tokens.",
    ),
    Flag("--discovery-backend", "DYN_DISCOVERY_BACKEND", "discovery.use", str, "The discovery plugin."),
    Flag("--request-plane", "DYN_REQUEST_PLANE", "transport.use", str, "The transport plugin."),
    Flag("--event-plane", "DYN_EVENT_PLANE", "events.use", str, "The event plane; the transport's own if not set."),
    Flag(
        "--engine",
        None,
        "workers.*.engine.use",
        str,
        "The engine plugin of the workers; without a config file there is one worker, of this engine.",
    ),
    Flag("--component", "DYN_COMPONENT", "workers.*.component", str, "The middle part of the workers' address."),
    Flag("--endpoint", "DYN_ENDPOINT", "workers.*.endpoint", str, "The last part of the workers' address."),
    Flag(
        "--endpoint-types",
        "DYN_ENDPOINT_TYPES",
        "workers.*.endpoint_types",
        str,
        "What the model can be asked for, with commas between: chat, completions, embeddings, score, rerank.",
    ),
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
        "--migration-max-seq-len",
        "DYN_MIGRATION_MAX_SEQ_LEN",
        "client.migration_max_seq_len",
        int,
        "Tokens of prompt and answer up to which a request can move in mid-answer.",
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
    Flag(
        "--custom-jinja-template",
        "DYN_CUSTOM_JINJA_TEMPLATE",
        "workers.*.model.custom_jinja_template",
        str,
        "A file with a chat template, in place of the one in the model's folder.",
    ),
    Flag(
        "--system-port",
        "DYN_SYSTEM_PORT",
        "workers.*.system_port",
        int,
        "Port of a worker process's own health and metrics; 0 for a free one.",
    ),
    Flag(
        None,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        "workers.*.grace_period",
        float,
        "Seconds that a stopping worker still accepts requests after leaving discovery.",
        lenient=True,
    ),
    Flag(
        None,
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
        "workers.*.shutdown_timeout",
        int,
        "Seconds beyond the grace period after which a stopping worker process ends at once, with exit code 70.",
    ),
    Flag(None, "DYN_HEALTH_CHECK_ENABLED", "workers.*.health_check.enabled", bool, "Probe engines that are silent."),
    Flag(
        None,
        "DYN_CANARY_WAIT_TIME",
        "workers.*.health_check.wait",
        float,
        "Seconds of silence before an engine is probed.",
    ),
    Flag(
        None,
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        "workers.*.health_check.timeout",
        float,
        "Seconds for the first item of the answer to a probe.",
    ),
    Flag(
        None,
        "DYN_HEALTH_CHECK_PAYLOAD",
        "workers.*.health_check.payload",
        str,
        "The request of a probe, as JSON, or as @ and the name of a file.",
    ),
    Flag("--metrics-prefix", "DYN_METRICS_PREFIX", "http.metrics_prefix", str, "Prefix of the frontend's metrics."),
    Flag(
        None,
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
        "http.overload_status",
        int,
        "HTTP status of a request that is refused for load: 503, 529 or 429.",
    ),
    Flag(None, "DYN_HTTP_BODY_LIMIT_MB", "http.body_limit_mb", int, "Largest request body, in MB."),
    Flag("--log-level", "DYN_LOG", "log.level", str, "Log level: debug, info, warning or error."),
    Flag(None, "DYN_LOGGING_JSONL", "log.json", bool, "Write the log as JSON lines."),
)


def read_plugin_flags() -> Iterator[Flag]:
    """Yield the flags that the installed plugins declare, by the names of their packages; none is imported."""
    read: set[Path] = set()
    for module in sorted({entry.module for entry in entry_points(group="dynamo")}):
        try:
            path = _flag_file(module)
            if path is not None and path not in read and path.is_file():
                read.add(path)
                yield from [_flag(**row) for row in tomllib.loads(path.read_text("utf-8"))["flag"]]
        except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the flags of %s cannot be read: %s: %s", module, type(error).__name__, error)


def _flag_file(module: str) -> Path | None:
    """Return the path of the flag file of a module's package, without importing it; None if there is no package."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin).with_name(FLAG_FILE)
    # A namespace: the first regular package below it.
    for location in spec.submodule_search_locations:
        folder = Path(location)
        for part in rest:
            folder /= part
            if (folder / "__init__.py").is_file():
                return folder / FLAG_FILE
    return None


def _flag(*, key: Any, type: str, help: Any, flag: Any = None, env: Any = None) -> Flag:
    """Return a flag of a plugin.

    Raises:
        ValueError: a text does not have the form of one.
        KeyError: there is no such type.
    """
    for name, text, form in (("key", key, _KEY), ("flag", flag or "--a-b", _FLAG), ("env", env or "DYN_A", _ENV)):
        if not isinstance(text, str) or not form.fullmatch(text):
            raise ValueError(f"{name} = {text!r} is none")
    return Flag(flag, env, key, _TYPES[type], str(help))


def table_of(own: Sequence[Flag], others: Iterator[Flag]) -> tuple[Flag, ...]:
    """Return `own` flags with those of plugins, each after the flags of its section. A name that is taken is kept."""
    table = list(own)
    taken = {name for flag in own for name in (flag.flag, flag.env) if name} | {*PROCESS_NAMES}
    for flag in others:
        names = {name for name in (flag.flag, flag.env) if name}
        if names and not names & taken:
            taken |= names
            section = flag.path[0]
            at = max((index for index, known in enumerate(table) if known.path[0] == section), default=len(table) - 1)
            table.insert(at + 1, flag)
    return tuple(table)


#: All flags, for help and for documentation in this order.
FLAGS = table_of(OWN_FLAGS, read_plugin_flags())
