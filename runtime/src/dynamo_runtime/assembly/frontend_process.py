"""A frontend as it runs: its parts, the order in which they start and close, and how they take new settings."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dynamo_core.certificates import server_context
from dynamo_core.contracts.admission import Admission
from dynamo_core.contracts.frontend import Frontend
from dynamo_core.contracts.response_store import ResponseStore
from dynamo_core.contracts.thresholds import THRESHOLDS, Changes, Thresholds
from dynamo_core.resources import ClosingStack
from dynamo_core.tasks import TaskSet
from dynamo_http.auth import ApiKeys
from dynamo_http.listener import Listener

from dynamo_runtime.assembly.extensions import Extensions
from dynamo_runtime.assembly.frontend_listeners import Guards, Listeners
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.assembly.reload import Plan, Standing, Step, switch
from dynamo_runtime.assembly.resolve import RESPONSE_STORE
from dynamo_runtime.assembly.routers import RouterMaker
from dynamo_runtime.dispatch.execution.pipeline import Pipeline
from dynamo_runtime.dispatch.frontend_peer_calls import PeerCalls
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadSync
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_runtime.settings import Settings
from dynamo_runtime.telemetry.loop_lag import LoopLag
from dynamo_runtime.telemetry.request_events import RequestEventHub

log = logging.getLogger(__name__)

#: Seconds that the event loop waits for a thread to yield the interpreter's lock, if no call into C keeps it.
_SWITCH_INTERVAL = 0.001
#: Seconds that a process waits to be ready before it joins a port that it shares.
JOIN_WAIT = 10.0


class AdmissionParts(NamedTuple):
    """The admission plugins by their sections, and the admission that asks them all."""

    plugins: Mapping[str, Admission]
    chain: Admission


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """The parts of a frontend, in the order in which `compose_frontend` makes them."""

    lag: LoopLag
    monitor: WorkerMonitor
    thresholds: ThresholdBook
    admission: AdmissionParts
    load_sync: PeerLoadSync | None
    request_events: RequestEventHub
    pipeline: Pipeline
    routers: RouterMaker
    models: Models
    response_store: ResponseStore | None
    api: Frontend
    #: Calls between frontends, which only extensions make.
    peers: PeerCalls
    guards: Guards
    extensions: Extensions
    health: Health
    listeners: Listeners


class FrontendProcess:
    """A running frontend: `open` before the plane's `start`, `start` after it, the rest before the plane is closed."""

    def __init__(self, parts: FrontendParts) -> None:
        self.parts = parts
        self._joined = asyncio.Event()
        self._tasks = TaskSet()

    @property
    def url(self) -> str:
        """The URL for clients, once started."""
        return self.parts.listeners.public.url

    @property
    def busy(self) -> bool:
        """Whether requests are being answered."""
        return any(listener.running for listener in self.parts.listeners.all)

    async def open(self) -> None:
        """Open the listeners: health and metrics are answered from here on, everything else with 503 until `start`.

        A port that is shared is held at once, and joined when this process is ready: until then the others answer.

        Raises:
            ConfigError: an address cannot be bound.
        """
        listeners = self.parts.listeners
        await listeners.open()
        log.info("listening at %s", self.url)
        if listeners.identity is not None:
            log.info("health and metrics of this process are at %s", listeners.identity["system_url"])
            self._tasks.spawn(self._join(listeners.public), name="join-port")
        else:
            self._joined.set()

    async def start(self, stack: ClosingStack, api: ClosingStack) -> None:
        """Begin to watch for workers, and to answer requests, if only with 503.

        The stacks close the parts in the reverse order: `api` those that clients and operators ask, before `stack`
        closes the parts below them. `drain` closes the listeners first of all.
        """
        parts = self.parts
        # Threads parse and encode large bodies meanwhile.
        sys.setswitchinterval(_SWITCH_INTERVAL)
        stack.enter(parts.thresholds).start()
        await stack.enter(parts.admission.chain).start()
        stack.enter(parts.lag).start()
        stack.enter(parts.pipeline)
        stack.enter(parts.monitor).start()
        stack.enter(parts.models).start()
        if parts.load_sync is not None:
            stack.enter(parts.load_sync).start()
        if parts.extensions.names:
            api.enter(parts.peers).start()
        if parts.response_store is not None:
            await api.enter(parts.response_store).start()
        await api.enter(parts.extensions).start()
        await api.enter(parts.api).start()
        for listener in parts.listeners.all:
            listener.started()

    async def ready(self) -> None:
        """Return once every model of the config has enough workers, as /ready says it."""
        await self._models_ready()
        await self._joined.wait()

    def leave(self) -> None:
        """Say on /ready, /live and /health that it goes, so that nothing more comes, and send clients elsewhere."""
        self.parts.health.shutting_down = True
        for listener in self.parts.listeners.all:
            listener.leave()

    async def drain(self, timeout: float) -> None:
        """Stop accepting and let running requests end for up to `timeout` seconds; what is left is cut."""
        await self._tasks.aclose()
        await asyncio.gather(*(listener.drain_and_close(timeout) for listener in self.parts.listeners.all))

    async def close_listeners(self) -> None:
        """Close whatever a drain that was cut short left open."""
        await self._tasks.aclose()
        for listener in self.parts.listeners.all:
            await listener.aclose()

    async def _models_ready(self) -> None:
        while not self.parts.health.readiness()[0]:
            await self.parts.models.changed()

    async def _join(self, public: Listener) -> None:
        """Begin to accept on a shared port; in the end also without being ready, so that clients are told why."""
        try:
            async with asyncio.timeout(JOIN_WAIT):
                await self._models_ready()
        except TimeoutError:
            log.info("not ready after %g s: %s", JOIN_WAIT, self.parts.health.readiness()[1])
        await public.accept()
        self._joined.set()

    # Reloading.

    def standing(self) -> list[Standing]:
        """Return what was set through the API."""
        rows = self.parts.thresholds.rows()
        return [Standing(f"admission.models.{model}.{name}", value) for model, name, value in rows]

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """See `dynamo_runtime.assembly.reload.Reloadable`."""
        parts = self.parts
        old, new = plan.before.settings, plan.loaded.settings
        keys = ApiKeys.load(old.auth, os.environ), ApiKeys.load(new.auth, os.environ)
        if plan.touches("auth.keys") and parts.guards.keys is not None:
            yield switch("auth.keys", parts.guards.keys.take, *keys)
        token = parts.guards.operators.token
        if plan.touches("admin.token") and token is not None and old.admin.token and new.admin.token:
            yield switch("admin.token", token.take, old.admin.token, new.admin.token)
        public, admin = parts.listeners.public, parts.listeners.admin
        tls = ("frontend.tls", new.frontend.tls, public), ("admin.tls", new.admin.tls, admin)
        for section, files, listener in tls:
            if plan.touches(section) and listener is not None:
                yield switch(section, listener.use_certificate, listener.certificate, server_context(files, section))
        before, after = configured_thresholds(old), configured_thresholds(new)
        if before != after:
            configure = parts.thresholds.configure
            yield Step("admission", partial(configure, *after), partial(configure, *before))
        for section, admission in parts.admission.plugins.items():
            yield from plan.reconfigured(section, [admission])
        yield from plan.reconfigured("frontend", [parts.api])
        if parts.response_store is not None:
            yield from plan.reconfigured(RESPONSE_STORE, [parts.response_store])
        yield from parts.extensions.reload_steps(plan)
        yield from parts.routers.reload_steps(plan, parts.models.routers)


def configured_thresholds(settings: Settings) -> tuple[Thresholds, dict[str, Changes]]:
    """Return the thresholds that the configuration has for all models, and the changes that some models have."""
    section = settings.thresholds
    common = Thresholds(**{name: getattr(section, name) for name in THRESHOLDS})
    return common, {model: own.model_dump(exclude_unset=True) for model, own in section.models.items()}
