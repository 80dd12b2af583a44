"""The extension contract: code that runs beside the requests, such as a dashboard or a ledger. It decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.frontend import ModelDirectory
from dynamo_core.contracts.http_route import HttpRoute, OperatorCheck
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import FRONTEND_ROLE, Plugin
from dynamo_core.contracts.requests.request_events import RequestEvents
from dynamo_core.contracts.router import EndpointCaller, LoadView, PoolView
from dynamo_core.contracts.thresholds import ThresholdControl
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.contracts.transports.peers import FrontendPeers
from dynamo_core.errors import NotSupported
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

ViewT = TypeVar("ViewT")


class SettingsReport(Protocol):
    """The settings in force."""

    def rows(self) -> Sequence[tuple[str, Any, str]]:
        """Return every value as (key, value, origin). Secrets are ``***``."""


class ObservedPool(PoolView, Protocol):
    """The workers of one model in one role, and how each stands."""

    def state(self, instance_id: int) -> str:
        """Return why a worker is not routed to now, such as ``busy``, ``down`` or ``full``; else ``free``."""


class ObservedLoads(LoadView, Protocol):
    """The load per worker and rank."""

    def own_requests(self, instance_id: int) -> int:
        """Return requests of this frontend on a worker now; `requests` has those of others too, as far as they tell."""

    def own_prefill_tokens(self, instance_id: int, dp_rank: int) -> int:
        """Return tokens of this frontend's requests that are still to be prefilled on a rank."""

    def used_blocks(self, instance_id: int, dp_rank: int, block_size: int | None) -> int:
        """Return KV blocks in use on a rank: what its worker reported last, and what was placed since."""


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Access of operators to this process.

    `token` is whether they have to show a token. `opens` says whether a text is that token; a route that is not
    `guarded` goes by it. `accept` adds a check that is asked about each request for operators before the token is: it
    returns the name of the operator, None for a request that it does not know, or raises `HttpFault`. Requests of pages
    come to it too, so a check by cookie has to look for forgery.
    """

    token: bool
    opens: Callable[[str], bool]
    accept: Callable[[OperatorCheck], None]


@dataclass(frozen=True, slots=True)
class FrontendView:
    """A frontend, as extensions see it; see the fields of the same names in `ExtensionServices`."""

    models: ModelDirectory
    pools: Callable[[], Sequence[ObservedPool]]
    loads: ObservedLoads
    requests: RequestEvents
    peers: FrontendPeers
    thresholds: ThresholdControl
    admin: AdminAccess


class _OfFrontend(Generic[ViewT]):
    """A field of the frontend's view, of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, services: ExtensionServices, owner: type) -> ViewT:
        if services.frontend is None:
            raise NotSupported(f"extension {services.name!r} runs beside a worker, where no frontend is")
        view: ViewT = getattr(services.frontend, self._name)
        return view


@dataclass(frozen=True, slots=True)
class ExtensionServices:
    """The services that an extension is constructed with. Those of frontends raise `NotSupported` beside workers."""

    #: ``frontend`` in a process that answers clients, else ``worker``.
    role: str
    #: What the config calls this extension.
    name: str
    #: Where frontends and workers meet.
    namespace: str
    #: Registers metrics. `metrics.registry` has all metrics of the process.
    metrics: MetricsScope
    #: How the names of the frontend's metrics begin.
    metrics_prefix: str
    #: The settings in force: `rows()` gives (key, value, origin), secrets as `***`.
    settings: SettingsReport
    #: The directory of the processes.
    discovery: Discovery
    #: The event plane.
    events: EventPlane
    #: Calls an endpoint of a worker.
    call: EndpointCaller
    #: Names what is wrong with the extension in the log and at ``/health``; empty: nothing any more.
    report_failure: Callable[[str], None]
    #: Loads the class of a plugin by its kind and name, for extensions that others plug into; raises `PluginError`.
    load_plugin: Callable[[str, str], type[Plugin]]
    #: None in a process that only runs workers.
    frontend: FrontendView | None = None

    #: The models that are served now.
    models = _OfFrontend[ModelDirectory]()
    #: The workers that are there now, by model and role: each pool is a `PoolView`, and its `state(instance_id)` is
    #: `free` or why a worker gets no requests.
    pools = _OfFrontend[Callable[[], Sequence[ObservedPool]]]()
    #: The load of the workers and ranks, as this frontend accounts for it: a `LoadView`, and
    #: `used_blocks(instance_id, dp_rank, block_size)`.
    loads = _OfFrontend[ObservedLoads]()
    #: Subscriptions to the request events of this frontend.
    requests = _OfFrontend[RequestEvents]()
    #: Calls between the frontends of the deployment.
    peers = _OfFrontend[FrontendPeers]()
    #: The thresholds of busy workers, to read and to change.
    thresholds = _OfFrontend[ThresholdControl]()
    #: How operators reach this frontend: whether a `token` is asked for, whether a text `opens` their routes, and
    #: `accept(check)`, which adds a check of who has sent a request.
    admin = _OfFrontend[AdminAccess]()


class Extension(Plugin, AsyncResource):
    """An object per process. What it does wrong costs a request nothing: core logs it and names it at ``/health``."""

    #: The roles that it can run in. Any other `role` in the config is an error.
    ROLES: ClassVar[Sequence[str]] = (FRONTEND_ROLE,)
    #: The extensions, by the names of their plugins, that have to run in the same process, such as ``("feed",)``. A
    #: config without one of them is an error.
    NEEDS: ClassVar[Sequence[str]] = ()
    #: Whether it shows what clients must not see: a config without `admin.port` is then an error.
    NEEDS_ADMIN_PORT: ClassVar[bool] = False

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        self.config = config
        self.services = services
        self._tasks = TaskSet()

    def routes(self) -> Iterable[HttpRoute]:
        """Return the routes of this extension, in a process with a frontend. Called once, before the listeners open.

        Each is on the public or on the admin listener, with its keys and limits. A path that is taken is an error.
        """
        return ()

    async def start(self) -> None:
        """Start background work. Called once, before the routes can be reached, with a deadline of some seconds."""

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run background work until `aclose`. If it raises, that is reported as the failure of the extension."""
        task = self._tasks.spawn(coroutine, name=f"{self.services.name}: {name}")
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Stop background work. Safe twice, and without `start`. An override calls ``await super().aclose()`` too."""
        await self._tasks.aclose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.services.report_failure(f"{type(error).__name__}: {error}")
