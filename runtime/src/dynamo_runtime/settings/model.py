"""The typed settings. Keys that belong to a plugin are kept as they are; the plugin's own model checks them later."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from dynamo_core.certificates import ServerTls
from dynamo_core.contracts.admission import NO_ADMISSION
from dynamo_core.contracts.engine import AUTO_PARSER, DisaggregationMode
from dynamo_core.contracts.field_types import (
    Count,
    NotBool,
    Port,
    Positive,
    Seconds,
    SecondsOrZero,
    Text,
    Word,
    not_a_bool_number,
)
from dynamo_core.contracts.plugin import FRONTEND_ROLE, WORKER_ROLE
from dynamo_core.errors import BackendError
from dynamo_core.protocol.cards import check_model_name
from dynamo_http.settings import AuthSettings, HttpSettings
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _level(value: object) -> object:
    value = _lower(value)
    return "warning" if value == "warn" else value


def _mode(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return DisaggregationMode.parse(value).value
    except BackendError as error:
        raise ValueError(str(error)) from error


def _check_printable(value: str) -> str:
    check_model_name(value)
    return value


def _split(value: object) -> object:
    # The command lines people move from spell this "chat,completions".
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value


WorkerName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]
#: The word that the command lines people move from have for it.
NoneWord = BeforeValidator(_none)
Share = Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(not_a_bool_number), NoneWord]
Fraction = Annotated[float | None, Field(ge=0, allow_inf_nan=False), BeforeValidator(not_a_bool_number), NoneWord]
Tokens = Annotated[int | None, Field(ge=0), NotBool, NoneWord]
#: Seconds that a stopping worker has for its cleanup, if its time is not divided otherwise.
CLEANUP_TIME = 5.0

_STRICT = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class PluginSection(BaseModel):
    """A section that picks a plugin with `use`. Its other keys belong to that plugin."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    use: Text = Field(description="Name of the plugin.")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys, not yet checked; `LoadedSettings.plugin_config` does that."""
        return dict(self.model_extra or {})

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        # Options may hold secrets, and a repr ends up in logs.
        return [(name, getattr(self, name)) for name in type(self).model_fields]


class PluginEntry(PluginSection):
    """An entry of a list of plugins."""

    name: Word | None = Field(
        default=None,
        description="Its name, by which layers merge and keys such as `admission.NAME.KEY` are set; null means `use`.",
    )
    enabled: bool = Field(default=True, description="Whether the entry counts; a layer takes it out with `false`.")

    @property
    def key(self) -> str:
        """The name of the entry."""
        return self.name or self.use


class OptionalSection(BaseModel):
    """A section that may pick no plugin."""

    model_config = PluginSection.model_config

    use: Text | None = Field(default=None, description="Name of the plugin; null means none.")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys, not yet checked."""
        return dict(self.model_extra or {})

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [("use", self.use)]


class ResponseStoreSection(OptionalSection):
    """The store of responses between requests."""

    use: Text | None = Field(
        default=None, description="The response store plugin; null means that nothing is kept between requests."
    )


class FrontendSection(PluginSection):
    """The API for clients, and the address of the public listener."""

    use: Text = Field(default="openai", description="The frontend plugin: the API that clients see.")
    apis: tuple[Text, ...] | None = Field(
        default=None,
        description="The frontend plugins that are served, where they are several; null means `use` and those that "
        "belong to it, as far as they are installed.",
    )
    host: Text = Field(default="127.0.0.1", description="Address that the public listener binds.")
    port: Port = Field(default=8000, description="Port of the public listener; 0 takes any free one.")
    processes: Positive = Field(
        default=1, description="Frontend processes that share the port; more than 1 need a transport between processes."
    )
    tls: ServerTls = Field(default_factory=ServerTls)
    response_store: ResponseStoreSection = Field(default_factory=ResponseStoreSection)

    @model_validator(mode="after")
    def _check_apis(self) -> FrontendSection:
        if self.apis is not None and (self.use not in self.apis or len(set(self.apis)) < len(self.apis)):
            raise ValueError("`apis` must name each API once, that of `use` among them")
        return self


class ThresholdSettings(BaseModel):
    """The thresholds of a busy worker. Without admission control that uses them they have no effect."""

    model_config = _STRICT

    active_decode_blocks_threshold: Share = Field(
        default=None, description="Share of its KV blocks above which a rank of a worker is busy; null means none."
    )
    active_prefill_tokens_threshold: Tokens = Field(
        default=None,
        description="Prompt tokens yet to be computed above which a rank of a worker is busy; null means none.",
    )
    active_prefill_tokens_threshold_frac: Fraction = Field(
        default=None,
        description="The same, as a multiple of the engine's `max_num_batched_tokens`; null means none.",
    )


class AdmissionSection(ThresholdSettings, PluginSection):
    """The admission of requests."""

    model_config = PluginSection.model_config

    use: Text = Field(default=NO_ADMISSION, description="The admission plugin; `none` admits everything.")
    models: dict[Text, ThresholdSettings] = Field(
        default={}, description="Thresholds of single models, by name, over those for all."
    )


class AdmissionEntry(PluginEntry, AdmissionSection):
    """One of the admission plugins, which are asked in turn."""

    use: Text = Field(description="The admission plugin.")

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str) -> str:
        if use == NO_ADMISSION:
            raise ValueError(
                f"`{use}` is no plugin that could be asked: leave the entry out, or write `enabled: false`"
            )
        return use


EntryT = TypeVar("EntryT", bound=PluginEntry)
SectionT = TypeVar("SectionT", bound=PluginSection)
#: The tags show in no message, and cannot be names of entries.
_LIST, _MAPPING = "[list]", "[mapping]"
#: One plugin, or a list of them.
SectionOrList: TypeAlias = Annotated[
    Annotated[SectionT, Tag(_MAPPING)] | Annotated[tuple[EntryT, ...], Tag(_LIST)],
    Discriminator(lambda value: _LIST if isinstance(value, list | tuple) else _MAPPING),
]


class RouterSection(PluginSection):
    """The choice of a worker for a request."""

    use: Text = Field(default="round-robin", description="The router plugin.")


class TransportSection(PluginSection):
    """The transport of requests to workers."""

    use: Text = Field(default="inproc", description="The transport plugin; `inproc` keeps everything in one process.")


class DiscoverySection(PluginSection):
    """The discovery of workers by frontends."""

    use: Text = Field(default="memory", description="The discovery plugin; `memory` reaches one process only.")


class EventsSection(OptionalSection):
    """The events of caches and load from workers to routers."""

    use: Text | None = Field(
        default=None, description="The transport whose event plane is used; null means `transport.use`."
    )


class ExtensionEntry(PluginEntry):
    """An extension, which runs beside the requests."""

    use: Text = Field(description="The extension plugin.")
    role: Literal["frontend", "worker", "both"] = Field(
        default=FRONTEND_ROLE, description="The processes that it runs in: those with a frontend, of workers, or both."
    )

    def role_in(self, *, frontend: bool, worker: bool) -> str | None:
        """Return the role in a process that has these parts; None if it does not run there."""
        if frontend and self.role != WORKER_ROLE:
            return FRONTEND_ROLE
        return WORKER_ROLE if worker and self.role != FRONTEND_ROLE else None


class EngineSection(PluginSection):
    """The inference engine of a worker."""

    use: Text = Field(description="The engine plugin. The section's other keys are the engine's own.")


class AdminSettings(BaseModel):
    """The listener for operators."""

    model_config = _STRICT

    host: Text = Field(default="127.0.0.1", description="Address that the admin listener binds.")
    port: Port | None = Field(
        default=None, description="Port of the admin listener; null serves its routes on the public listener."
    )
    tls: ServerTls = Field(default_factory=ServerTls)
    token: Text | None = Field(
        default=None,
        description="What operators must send as a bearer token, or `sha256:` and its hash; null asks for none.",
    )


class ClientSettings(BaseModel):
    """Deadlines and retries on the way from the frontend to a worker. Times are in seconds."""

    model_config = _STRICT

    retries: Count = Field(default=2, description="Other workers to try while nothing of the answer has arrived.")
    first_item_timeout: Seconds = Field(default=300, description="Seconds until the first item of an answer.")
    total_timeout: Seconds = Field(default=590, description="Seconds until the end of an answer.")
    write_stall: Seconds = Field(
        default=30, description="Seconds that a client may leave its answer unread before it is cut."
    )
    place_stall: Seconds = Field(
        default=5,
        description="Seconds that an answer may keep its place at a worker although its client takes nothing of what "
        "waits for it, if the answer is paused or others wait for that worker; then it is given up.",
    )
    unread_answer_limit_mb: Positive = Field(
        default=1, description="MB that are gathered of an answer that its client does not read until it is paused."
    )
    unread_answers_limit_mb: Positive = Field(
        default=64,
        description="MB of all such answers of a process; beyond them the largest one of the tenant that has most is "
        "given up.",
    )
    keep_alive: Seconds = Field(default=15, description="Seconds of silence after which a stream gets a comment line.")
    accept_timeout: Seconds = Field(default=5, description="Seconds for a worker to accept or refuse a request.")
    decode_wait: SecondsOrZero = Field(
        default=30, description="Seconds that a prefilled request waits for a decode worker while all are busy."
    )
    migration_wait: SecondsOrZero = Field(
        default=20, description="Seconds that a request whose worker has failed waits for another one."
    )
    migration_max_seq_len: Positive | None = Field(
        default=None,
        description="Tokens of prompt and answer up to which a request can move in mid-answer; null means any number.",
    )
    stall_timeout: Seconds | None = Field(
        default=None,
        description="Seconds that a worker which has accepted a request may send nothing before it counts as failed; "
        "null means for as long as its process and the wire to it live. Longer than the longest prefill, unless the "
        "engine reports progress.",
    )
    min_initial_workers: Count = Field(default=1, description="Workers that a model needs before `/ready` says 200.")
    shutdown_timeout: Seconds = Field(
        default=30, description="Seconds for running streams to end when the frontend stops."
    )
    drain_grace: SecondsOrZero = Field(
        default=5, description="Seconds that a stopping frontend process still accepts requests; `/ready` says 503."
    )
    token_cache_mb: Count = Field(
        default=64, description="MB in which the frontend remembers prompts with their tokens; 0 remembers none."
    )
    model_cache: str | None = Field(
        default=None,
        description="Folder for model files fetched from workers; null means the user's own cache folder, "
        "empty means none.",
    )
    share_loads: bool | None = Field(
        default=None,
        description="Whether frontends share the load that they have placed on workers; null means where "
        "`frontend.processes` is more than 1, or admission goes by thresholds.",
    )


class LogSettings(BaseModel):
    """The level and format of logs."""

    model_config = _STRICT

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_level)] = Field(
        default="info", description="The least severe level that is logged; `warn` is read as `warning`."
    )
    # `json` is a method of pydantic's base class.
    json_lines: bool = Field(default=False, alias="json", description="Whether the log is written as JSON lines.")


class ModelSettings(BaseModel):
    """The model that a worker serves."""

    model_config = _STRICT

    name: Annotated[Text, AfterValidator(_check_printable)] = Field(
        description="The model's public name: at most 256 characters, none of them invisible."
    )
    path: Text | None = Field(
        default=None, description="A folder in the Hugging Face layout; null means no files and the byte tokenizer."
    )
    migration_limit: Count = Field(
        default=0, description="How often a request may move to another worker; 0 means never."
    )
    custom_jinja_template: Text | None = Field(
        default=None, description="A file with a chat template; null means the one in the model's folder."
    )
    tool_call_parser: Annotated[Text | None, BeforeValidator(_none)] = Field(
        default=AUTO_PARSER,
        description="The plugin that finds calls of tools in the model's answers; `auto` is the one that fits the "
        "model's template, `none` or null finds none.",
    )
    reasoning_parser: Annotated[Text | None, BeforeValidator(_none)] = Field(
        default=AUTO_PARSER,
        description="The plugin that tells reasoning from content in the model's answers; `auto` is the one that fits "
        "the model's template, `none` or null does not.",
    )


class HealthCheckSettings(BaseModel):
    """The check of a worker whether its engine still answers."""

    model_config = _STRICT

    enabled: bool = Field(default=False, description="Whether the engine is probed when it is silent.")
    wait: Seconds = Field(default=10, description="Seconds that the engine is silent before it is probed.")
    timeout: Seconds = Field(default=3, description="Seconds for the first item of the answer to a probe.")
    payload: dict[str, Any] | str | None = Field(
        default=None,
        description="The request of a probe: fields of a `PreprocessedRequest`, as a mapping, as JSON, or as `@` and "
        "the name of a file. Null leaves it to the engine; one token after one token if that says nothing.",
    )
    unregister: bool = Field(
        default=True, description="Whether a worker whose engine does not answer leaves discovery until it does."
    )


class WorkerSettings(BaseModel):
    """One kind of worker: an engine, the model it serves, and how many of it run."""

    model_config = _STRICT

    model: ModelSettings = Field(description="The model that the worker serves.")
    engine: EngineSection = Field(description="The engine of the worker.")
    replicas: Positive = Field(default=1, description="How many of this worker run.")
    disaggregation_mode: Annotated[Literal["agg", "prefill", "decode"], BeforeValidator(_mode)] = Field(
        default="agg", description="The role: whole inference (`agg`, also spelt `aggregated`), or one half of it."
    )
    engine_request_limit: Positive | None = Field(
        default=None, description="Requests that run at once; more wait or are refused. Null means no limit."
    )
    request_queue_limit: Annotated[int, Field(ge=2), NotBool] = Field(
        default=16, description="Requests that wait once `engine_request_limit` is reached."
    )
    enable_kv_routing: bool = Field(
        default=True, description="Whether the worker tells what its KV cache holds, for routers that go by it."
    )
    enable_local_indexer: bool = Field(
        default=True, description="What the model card says of it; never true of a decode worker."
    )
    system_host: Text = Field(default="127.0.0.1", description="Address of a worker process's own health and metrics.")
    system_port: Port | None = Field(
        default=0, description="Their port, plus the replica's number; 0 takes any free one, null offers none."
    )
    component: Word | None = Field(
        default=None,
        description="The middle part of the worker's address; null means `prefill` in the role of that name, else "
        "`backend`.",
    )
    endpoint: Word = Field(default="generate", description="The last part of the worker's address.")
    endpoint_types: Annotated[
        tuple[Literal["chat", "completions", "embeddings", "score", "rerank"], ...],
        Field(min_length=1),
        BeforeValidator(_split),
    ] = Field(default=("chat", "completions"), description="What the model can be asked for.")
    grace_period: SecondsOrZero = Field(
        default=5,
        description="Seconds that a stopping worker still accepts requests after leaving discovery, and that an engine "
        "which is starting then has to finish. None of it after Ctrl-C.",
    )
    drain_timeout: Seconds | None = Field(
        default=None,
        description="Seconds for the requests of a stopping worker to end, and for its engine to drain; null means "
        "`shutdown_timeout` less 5, but at least half of it.",
    )
    shutdown_timeout: Seconds = Field(
        default=30,
        description="Seconds beyond `grace_period` after which a stopping worker process ends at once, with exit code "
        "70.",
    )
    stall_exit: SecondsOrZero = Field(
        default=300,
        description="Seconds that the event loop of a worker process may stand still before the process ends with exit "
        "code 70; 0 means for ever.",
    )
    health_check: HealthCheckSettings = Field(default_factory=HealthCheckSettings)

    @model_validator(mode="after")
    def _check_deadlines(self) -> WorkerSettings:
        if self.drain_timeout is not None and self.drain_timeout >= self.shutdown_timeout:
            raise ValueError(
                f"drain_timeout ({self.drain_timeout:g} s) must be less than shutdown_timeout "
                f"({self.shutdown_timeout:g} s), or there is no time left to clean up: raise shutdown_timeout"
            )
        return self

    @property
    def request_drain(self) -> float:
        """`drain_timeout`, or what stands for it."""
        if self.drain_timeout is not None:
            return self.drain_timeout
        return max(self.shutdown_timeout - CLEANUP_TIME, self.shutdown_timeout / 2)


class Settings(BaseModel):
    """The whole configuration, apart from `profiles`, which are gone once one of them has been laid over the file."""

    model_config = _STRICT

    namespace: Word = Field(default="dynamo", description="Frontends and workers meet inside a namespace.")
    hooks: tuple[Text, ...] = Field(default=(), description="Plugins that only listen, by name.")
    frontend: FrontendSection = Field(default_factory=FrontendSection)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    admission: SectionOrList[AdmissionSection, AdmissionEntry] = Field(default_factory=AdmissionSection)
    router: RouterSection = Field(default_factory=RouterSection)
    transport: TransportSection = Field(default_factory=TransportSection)
    events: EventsSection = Field(default_factory=EventsSection)
    extensions: tuple[ExtensionEntry, ...] = Field(
        default=(),
        description="Extensions: `use`, `name`, `enabled`, `role` (`frontend`, `worker` or `both`), and keys of the "
        "plugin.",
    )
    discovery: DiscoverySection = Field(default_factory=DiscoverySection)
    client: ClientSettings = Field(default_factory=ClientSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    reload: Literal["manual", "watch"] = Field(
        default="manual",
        description="Whether settings are read again only when asked (`manual`), or also when the config file, a file "
        "that it refers to, or a certificate changes (`watch`).",
    )
    workers: dict[WorkerName, WorkerSettings] = Field(default_factory=dict, description="Workers by name.")

    @property
    def admissions(self) -> dict[str, AdmissionSection]:
        """The admission plugins that are asked, in order, by the path of their section."""
        if isinstance(self.admission, AdmissionSection):
            return {} if self.admission.use == NO_ADMISSION else {"admission": self.admission}
        return {f"admission.{entry.key}": entry for entry in self.admission if entry.enabled}

    @property
    def extension_entries(self) -> dict[str, ExtensionEntry]:
        """The extensions, by the path of their section."""
        return {f"extensions.{entry.key}": entry for entry in self.extensions if entry.enabled}

    @property
    def thresholds(self) -> AdmissionSection:
        """The section that holds the thresholds."""
        if isinstance(self.admission, AdmissionSection):
            return self.admission
        known = {"models", *ThresholdSettings.model_fields}
        return next((entry for entry in self.admissions.values() if entry.model_fields_set & known), AdmissionSection())


#: Keys that `dynamo reload` changes while the process runs, with all keys below them. Plugins name theirs in
#: `PluginConfig.LIVE`.
LIVE_KEYS = frozenset(
    {
        "auth.keys",
        "admin.token",
        "admin.tls",
        "frontend.tls",
        *(f"admission.{name}" for name in ThresholdSettings.model_fields),
        "admission.models",
        "log.level",
    }
)

#: Live keys whose value decides whether there is a guard, or TLS, at all: to switch that on or off needs a restart, so
#: that no slip in a file opens a server that runs.
SWITCHES = frozenset({"auth.keys", "admin.token", "admin.tls.cert", "frontend.tls.cert"})

#: Keys that name a file whose content is live as well.
CERTIFICATE_FILES = tuple(
    f"{section}.tls.{name}" for section in ("frontend", "admin") for name in ServerTls.model_fields
)
