"""The typed settings. Keys that belong to a plugin are kept as they are; the plugin's own model checks them later."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticKnownError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict


def _not_a_bool(value: object) -> object:
    # pydantic reads true as 1, which hides slips such as `replicas: yes`.
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _not_a_bool_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _level(value: object) -> object:
    value = _lower(value)
    return "warning" if value == "warn" else value


def _mode(value: object) -> object:
    value = _lower(value)
    return "agg" if value == "aggregated" else value


def _split(value: object) -> object:
    # The command lines people move from spell this "chat,completions".
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value


# The bounds come first, so that the JSON Schema sees them; validators that run before them stand after.
NotBool = BeforeValidator(_not_a_bool)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_not_a_bool_number)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_not_a_bool_number)]
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
Count = Annotated[int, Field(ge=0), NotBool]
Positive = Annotated[int, Field(ge=1), NotBool]
#: Namespaces, components and endpoints are parts of keys and subjects, where dots and slashes separate.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
WorkerName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]
Text = Annotated[str, StringConstraints(min_length=1)]

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


class FrontendSection(PluginSection):
    """The API for clients, and the address of the public listener."""

    use: Text = Field(default="openai", description="The frontend plugin: the API that clients see.")
    host: Text = Field(default="127.0.0.1", description="Address that the public listener binds.")
    port: Port = Field(default=8000, description="Port of the public listener; 0 takes any free one.")


class AdmissionSection(PluginSection):
    """Who may enter."""

    use: Text = Field(default="none", description="The admission plugin; `none` admits everything.")


class RouterSection(PluginSection):
    """Which worker serves a request."""

    use: Text = Field(default="round-robin", description="The router plugin.")


class TransportSection(PluginSection):
    """How requests reach workers."""

    use: Text = Field(default="inproc", description="The transport plugin; `inproc` keeps everything in one process.")


class DiscoverySection(PluginSection):
    """How frontends find workers."""

    use: Text = Field(default="memory", description="The discovery plugin; `memory` reaches one process only.")


class EventsSection(BaseModel):
    """How workers tell routers about their caches and load."""

    model_config = PluginSection.model_config

    use: Text | None = Field(
        default=None, description="The transport whose event plane is used; null means `transport.use`."
    )

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys, not yet checked."""
        return dict(self.model_extra or {})

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [("use", self.use)]


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


class ClientSettings(BaseModel):
    """Deadlines and retries on the way from the frontend to a worker. Times are in seconds."""

    model_config = _STRICT

    retries: Count = Field(default=2, description="Other workers to try while nothing of the answer has arrived.")
    first_item_timeout: Seconds = Field(default=300, description="Seconds until the first item of an answer.")
    total_timeout: Seconds = Field(default=590, description="Seconds until the end of an answer.")
    write_stall: Seconds = Field(
        default=30, description="Seconds that a client may leave its answer unread before it is cut."
    )
    keep_alive: Seconds = Field(default=15, description="Seconds of silence after which a stream gets a comment line.")
    accept_timeout: Seconds = Field(default=5, description="Seconds for a worker to accept or refuse a request.")
    min_initial_workers: Count = Field(default=1, description="Workers that a model needs before `/ready` says 200.")
    shutdown_timeout: Seconds = Field(
        default=30, description="Seconds for running streams to end when the frontend stops."
    )
    drain_grace: SecondsOrZero = Field(
        default=5, description="Seconds that a stopping frontend process still accepts requests; `/ready` says 503."
    )
    model_cache: str | None = Field(
        default=None,
        description="Folder for model files fetched from workers; null means the user's own cache folder, "
        "empty means none.",
    )


class HttpSettings(BaseModel):
    """Limits of the listeners."""

    model_config = _STRICT

    body_limit_mb: Positive = Field(default=45, description="Largest request body, in MB.")
    max_connections: Positive = Field(default=10000, description="Connections open at once.")
    idle_timeout: Seconds = Field(default=75, description="Seconds after which an idle connection is closed.")
    metrics_prefix: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")] = Field(
        default="dynamo_frontend", description="Prefix of the frontend's metrics."
    )


class LogSettings(BaseModel):
    """What is logged, and how."""

    model_config = _STRICT

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_level)] = Field(
        default="info", description="The least severe level that is logged; `warn` is read as `warning`."
    )
    # `json` is a method of pydantic's base class.
    json_lines: bool = Field(default=False, alias="json", description="Whether the log is written as JSON lines.")


class ModelSettings(BaseModel):
    """The model that a worker serves."""

    model_config = _STRICT

    name: Text = Field(description="The model's public name.")
    path: Text | None = Field(
        default=None, description="A folder in the Hugging Face layout; null means no files and the byte tokenizer."
    )
    migration_limit: Count = Field(
        default=0, description="How often a request may move to another worker; 0 means never."
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
    system_host: Text = Field(default="127.0.0.1", description="Address of a worker process's own health and metrics.")
    system_port: Port | None = Field(
        default=0, description="Their port, plus the replica's number; 0 takes any free one, null offers none."
    )
    component: Word = Field(default="backend", description="The middle part of the worker's address.")
    endpoint: Word = Field(default="generate", description="The last part of the worker's address.")
    endpoint_types: Annotated[
        tuple[Literal["chat", "completions", "embeddings"], ...], Field(min_length=1), BeforeValidator(_split)
    ] = Field(default=("chat", "completions"), description="What the model can be asked for.")
    grace_period: SecondsOrZero = Field(
        default=5, description="Seconds that a stopping worker still accepts requests after leaving discovery."
    )
    drain_timeout: Seconds = Field(default=30, description="Seconds for the requests of a stopping worker to end.")


class Settings(BaseSettings):
    """The whole configuration, apart from `profiles`, which are gone once one of them has been laid over the file."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    namespace: Word = Field(default="dynamo", description="Frontends and workers meet inside a namespace.")
    hooks: tuple[Text, ...] = Field(default=(), description="Plugins that only listen, by name.")
    frontend: FrontendSection = Field(default_factory=FrontendSection)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    admission: AdmissionSection = Field(default_factory=AdmissionSection)
    router: RouterSection = Field(default_factory=RouterSection)
    transport: TransportSection = Field(default_factory=TransportSection)
    events: EventsSection = Field(default_factory=EventsSection)
    discovery: DiscoverySection = Field(default_factory=DiscoverySection)
    client: ClientSettings = Field(default_factory=ClientSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    workers: dict[WorkerName, WorkerSettings] = Field(default_factory=dict, description="Workers by name.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the loader hands over. It has merged every layer and knows where each value came from."""
        return (init_settings,)
