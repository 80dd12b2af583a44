"""The composition of a frontend: one ordered function, in which each part is made from those before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dynamo_core.contracts.admission import Admission, AdmissionServices
from dynamo_core.contracts.extension import AdminAccess, FrontendView
from dynamo_core.contracts.frontend import FrontendServices
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.response_store import ResponseStore, ResponseStoreServices
from dynamo_core.contracts.router import Router, RouterServices
from dynamo_core.errors import OVERLOAD
from dynamo_core.protocol.records import RequestRecord
from dynamo_http.auth import Operators

from dynamo_runtime.assembly.extensions import Extensions, ProvidedServices
from dynamo_runtime.assembly.frontend_listeners import MB, Guards, make_listeners
from dynamo_runtime.assembly.frontend_process import (
    AdmissionParts,
    FrontendParts,
    FrontendProcess,
    configured_thresholds,
)
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.assembly.reload import Reload, reload_route
from dynamo_runtime.assembly.resolve import RESPONSE_STORE, load_parsers, store_remark
from dynamo_runtime.assembly.routers import RouterMaker
from dynamo_runtime.assembly.worker_routes import WorkerRoutes
from dynamo_runtime.dispatch.admission import AdmissionChain
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.frontend_peer_calls import ExtensionPeers, PeerCalls
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadSync
from dynamo_runtime.dispatch.load.retry_after import RetryAfterEstimator
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.cache import NO_CACHE, ModelCache
from dynamo_runtime.dispatch.models.gauges import FrontGauges
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_runtime.dispatch.unread_answers import UnreadAnswers
from dynamo_runtime.telemetry.loop_lag import LoopLag
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_runtime.telemetry.request_events import ExtensionRequestEvents, RequestEventHub

log = logging.getLogger(__name__)


def compose_frontend(plane: ProcessServices, role: Role, reload: Reload) -> FrontendProcess:
    """Make the parts of a frontend, each from those before it; nothing is started.

    Three parts are told of later ones, each by a line of its own: the monitor of the rule of admission, the models of
    the tokenizers of the API, and the API of the routes that are served beside its own.
    """
    settings, picked, picked_router = plane.settings, plane.resolved.frontend, plane.resolved.router
    if picked is None or picked_router is None:
        raise ValueError("the plane was made for a role without a frontend")

    # The load of the workers, and which of them are too busy.
    tracker = LoadTracker()
    monitor = WorkerMonitor(tracker, plane.events, plane.discovery)
    thresholds = _thresholds(plane, monitor.reconsider)
    retry_after = RetryAfterEstimator()
    admission = _admission(plane, thresholds, retry_after)
    if thresholds.armed:
        monitor.use_rule(admission.chain.is_busy)
    load_sync = _load_sync(plane, tracker, needed=role.shares_port or thresholds.armed)

    # The way of a request to a worker.
    events = RequestEventHub()
    pipeline = _pipeline(plane, admission.chain, tracker, retry_after, events)
    caller = Caller(plane.transport)
    routers = RouterMaker(picked_router)
    models = _models(plane, pipeline, caller, partial(_router, plane, monitor, tracker, caller, routers))

    # The API, and the extensions beside it.
    response_store = _response_store(plane)
    requests = _requests(plane, models, tracker, monitor, retry_after, events)
    served: dict[ListenerName, Sequence[HttpRoute]] = {}
    services = _frontend_services(plane, models, requests, thresholds, response_store, served.__getitem__)
    api = picked.cls(picked.config, services)
    models.use_tokenizers(api.load_tokenizer)
    peers = PeerCalls(plane.discovery, plane.transport, namespace=settings.namespace, replica=role.replica)
    guards = Guards.of(settings, plane.metrics)
    view = partial(_view, models, tracker, thresholds, guards.operators)
    extensions = Extensions(plane, plane.resolved.extensions, _provider(plane, events, peers, view))

    # The listeners, with the routes of all of these.
    health = Health(settings, models, lambda: plane.waits_for, lambda: extensions.failures)
    routes = [*api.routes(), *WorkerRoutes(models, caller).routes(), reload_route(reload)]
    listeners = make_listeners(plane, role, guards, health, routes, extensions)
    served |= listeners.routes
    return FrontendProcess(
        FrontendParts(
            lag=LoopLag(plane.metrics, prefix=settings.http.metrics_prefix),
            monitor=monitor,
            thresholds=thresholds,
            admission=admission,
            load_sync=load_sync,
            request_events=events,
            pipeline=pipeline,
            routers=routers,
            models=models,
            response_store=response_store,
            api=api,
            peers=peers,
            guards=guards,
            extensions=extensions,
            health=health,
            listeners=listeners,
        )
    )


def _thresholds(plane: ProcessServices, changed: Callable[[str], None]) -> ThresholdBook:
    common, models = configured_thresholds(plane.settings)
    armed = any(picked.cls.ARMS_THRESHOLDS for picked in plane.resolved.admission)
    namespace = plane.settings.namespace
    return ThresholdBook(plane.discovery, namespace, common=common, models=models, armed=armed, changed=changed)


def _admission(plane: ProcessServices, thresholds: ThresholdBook, retry_after: RetryAfterEstimator) -> AdmissionParts:
    picked = plane.resolved.admission
    services = AdmissionServices(plane.metrics, thresholds=thresholds, retry_after=retry_after.retry_after)
    by_section: dict[str, Admission] = {}
    for one in picked:
        own = services
        if sum(other.name == one.name for other in picked) > 1:
            # Two of a kind have metrics of the same names.
            own = replace(services, metrics=plane.metrics.scope(entry=_entry(one.section)))
        by_section[one.section] = one.cls(one.config, own)
    entries = {_entry(section): admission for section, admission in by_section.items()}
    chain = AdmissionChain.of(entries, services, patience=plane.settings.client.total_timeout)
    return AdmissionParts(by_section, chain)


def _entry(section: str) -> str:
    """Return the name of an entry of a list, from its section."""
    return section.rpartition(".")[2]


def _load_sync(plane: ProcessServices, tracker: LoadTracker, *, needed: bool) -> PeerLoadSync | None:
    """Share loads if the settings say so, else where it is `needed`: the loads of the others count too."""
    wanted = plane.settings.client.share_loads
    if not plane.transport.CROSS_PROCESS or not (needed if wanted is None else wanted):
        return None
    peers = plane.metrics.gauge(
        f"{plane.settings.http.metrics_prefix}_load_peers",
        "Frontends, other than this one, that have reported their loads lately.",
    )
    return PeerLoadSync(tracker, plane.events, plane.discovery, peers=peers.labels().set)


def _pipeline(
    plane: ProcessServices,
    admission: Admission,
    tracker: LoadTracker,
    retry_after: RetryAfterEstimator,
    events: RequestEventHub,
) -> Pipeline:
    client, http = plane.settings.client, plane.settings.http
    return Pipeline(
        transport=plane.transport,
        admission=admission,
        tracker=tracker,
        deadlines=Deadlines(
            retries=client.retries,
            accept=client.accept_timeout,
            first_item=client.first_item_timeout,
            total=client.total_timeout,
            decode_wait=client.decode_wait,
            migration_wait=client.migration_wait,
            migration_max_seq_len=client.migration_max_seq_len,
            stall=client.stall_timeout,
        ),
        metrics=plane.metrics,
        prefix=http.metrics_prefix,
        unread=UnreadAnswers(
            plane.metrics,
            http.metrics_prefix,
            most_each=client.unread_answer_limit_mb * MB,
            most_all=client.unread_answers_limit_mb * MB,
            stall=client.place_stall,
        ),
        retry_after=retry_after.retry_after,
        forward_identity=http.forward_identity,
        events=events,
    )


def _router(
    plane: ProcessServices,
    monitor: WorkerMonitor,
    tracker: LoadTracker,
    caller: Caller,
    routers: RouterMaker,
    pool: Pool,
) -> Router:
    monitor.take(pool)
    return routers.make(
        RouterServices(
            pool=pool,
            tracker=tracker,
            events=plane.events,
            directory=plane.discovery,
            metrics=plane.metrics,
            call=caller,
        )
    )


def _models(
    plane: ProcessServices, pipeline: Pipeline, caller: Caller, make_router: Callable[[Pool], Router]
) -> Models:
    # Within one process the worker holds the files anyway; fetching them costs nothing.
    setting = plane.settings.client.model_cache if plane.transport.CROSS_PROCESS else NO_CACHE
    return Models(
        discovery=plane.discovery,
        pipeline=pipeline,
        caller=caller,
        make_router=make_router,
        announce=plane.announce,
        expected={worker.model.name for worker in plane.settings.workers.values()},
        model_cache=ModelCache.from_setting(setting),
        load_parsers=partial(load_parsers, plane.loader),
    )


def _response_store(plane: ProcessServices) -> ResponseStore | None:
    picked = plane.resolved.response_store
    if picked is None:
        return None
    remark = store_remark(plane.resolved, plane.settings.frontend.processes)
    if remark:
        log.warning("%s: %s", RESPONSE_STORE, remark)
    return picked.cls(picked.config, ResponseStoreServices(plane.metrics, plane.settings.namespace))


def _requests(
    plane: ProcessServices,
    models: Models,
    tracker: LoadTracker,
    monitor: WorkerMonitor,
    retry_after: RetryAfterEstimator,
    events: RequestEventHub,
) -> RequestTracker:
    """Account for the requests of clients: metrics, gauges, the estimate of `Retry-After`, and the hook."""
    prefix = plane.settings.http.metrics_prefix
    gauges = FrontGauges(models, tracker, prefix, monitor)
    plane.metrics.registry.register(gauges)

    def finished(record: RequestRecord) -> None:
        gauges.finished(record)
        if record.instance_id is not None:
            retry_after.ended(record.model)
        elif record.error_type == OVERLOAD:
            retry_after.refused(record.model)
        plane.announce("dynamo_request_finished", record=record)

    return RequestTracker(plane.metrics, finished, prefix=prefix, events=events)


def _frontend_services(
    plane: ProcessServices,
    models: Models,
    requests: RequestTracker,
    thresholds: ThresholdBook,
    response_store: ResponseStore | None,
    routes: Callable[[ListenerName], Sequence[HttpRoute]],
) -> FrontendServices:
    client, http = plane.settings.client, plane.settings.http
    return FrontendServices(
        models=models,
        requests=requests,
        metrics=plane.metrics,
        write_stall=client.write_stall,
        keep_alive=client.keep_alive,
        metrics_prefix=http.metrics_prefix,
        overload_status=http.overload_status,
        token_cache=client.token_cache_mb * MB,
        thresholds=thresholds,
        response_store=response_store,
        routes=routes,
    )


def _view(
    models: Models,
    tracker: LoadTracker,
    thresholds: ThresholdBook,
    operators: Operators,
    requests: ExtensionRequestEvents,
    peers: ExtensionPeers,
) -> FrontendView:
    token = operators.token
    return FrontendView(
        models=models,
        pools=models.pools,
        loads=tracker,
        requests=requests,
        peers=peers,
        thresholds=thresholds,
        admin=AdminAccess(
            token=token is not None,
            opens=token.opens if token is not None else lambda text: False,
            accept=operators.accept,
        ),
    )


def _provider(
    plane: ProcessServices,
    events: RequestEventHub,
    calls: PeerCalls,
    view: Callable[[ExtensionRequestEvents, ExtensionPeers], FrontendView],
) -> Callable[[str], ProvidedServices]:
    """Return what gives an extension its view, with events and calls of its own that end with it."""
    dropped = plane.metrics.counter(
        f"{plane.settings.http.metrics_prefix}_extension_events_dropped_total",
        "Events of requests that an extension has lost because it did not read them in time.",
        ("extension",),
    )

    def provide(name: str) -> ProvidedServices:
        requests = ExtensionRequestEvents(events, dropped.labels(name))
        peers = ExtensionPeers(calls, name)

        def withdraw() -> None:
            requests.close()
            peers.close()

        return ProvidedServices(view(requests, peers), withdraw)

    return provide
