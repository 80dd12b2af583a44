"""`Application`: the parts of one process, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from dynamo_core.errors import ConfigError
from dynamo_core.resources import AsyncResource, ClosingStack

from dynamo_runtime.assembly.frontend_composition import compose_frontend
from dynamo_runtime.assembly.frontend_process import FrontendProcess
from dynamo_runtime.assembly.process_roles import Role, role_of
from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.assembly.reload import OneReload, Reloader, ReloadSwitch, reload_here
from dynamo_runtime.assembly.worker_process import WorkerProcess
from dynamo_runtime.settings import LoadedSettings

log = logging.getLogger(__name__)


class Application(AsyncResource):
    """One process in its role: everything, a frontend, or a worker. Making it starts nothing.

    Raises:
        ConfigError: the settings or a plugin are wrong.
    """

    def __init__(
        self, loaded: LoadedSettings, role: Role | None = None, *, stopping: Callable[[], None] | None = None
    ) -> None:
        """Take as `stopping` the callback for a worker that begins to stop, for whatever reason."""
        self._settings = loaded.settings
        self.role = role or role_of(loaded.settings, None)
        self._plane = ProcessServices(loaded, self.role)
        if not self.role.whole and not self._plane.transport.CROSS_PROCESS:
            raise ConfigError(
                f"transport.use: {self._plane.transport.NAME} keeps everything in one process, "
                + ("where --only has no meaning" if self.role.hosted is None else "where no frontend finds the engine")
                + ": set it to a transport that reaches other processes, such as tcp"
            )
        self.reloader = Reloader(loaded, self._plane.resolved, self.role)
        self._own_reload = OneReload(partial(reload_here, self.reloader, self.role.name))
        #: Reloads the settings of all processes that belong together.
        self.reload = ReloadSwitch(self._own_reload)
        self.frontend_process = compose_frontend(self._plane, self.role, self.reload) if self.role.frontend else None
        self.worker_process = WorkerProcess(self._plane, self.role, stopping=stopping)
        if self.frontend_process is None:
            self.reloader.attach([self._plane, self.worker_process])
        else:
            frontend = self.frontend_process
            self.reloader.attach([frontend, self._plane, self.worker_process], frontend.standing)
        self._stack = ClosingStack("this process")
        # Taken in reverse, after the listeners and the workers: what is left then belongs to the process.
        self._connected = self._stack.part("Phase 3: disconnecting from discovery and transport")
        self._running = self._stack.part("Phase 2: waiting for what still runs")
        self._asked = self._stack.part("Phase 1: closing what can still be asked")
        self._stopped = False
        self._phase = ""

    @property
    def url(self) -> str | None:
        """The URL of this process for clients, once started; None for a worker."""
        return self.frontend_process.url if self.frontend_process is not None else None

    @property
    def busy(self) -> bool:
        """Whether requests of clients are being answered."""
        return self.frontend_process is not None and self.frontend_process.busy

    def doing(self) -> str:
        """Return what it is at while it starts or stops, in a few words for the log. For any thread."""
        connecting = "" if self._stopped else self._plane.waits_for
        return connecting or self.worker_process.doing or self._stack.stage or self._phase

    async def start(self) -> None:
        """Open, then start the workers; raise what either does."""
        await self.open()
        await self.start_workers()

    async def open(self) -> None:
        """Open the listeners, and connect.

        So a taken port is told before anything is waited for, and `/ready` can be asked meanwhile.

        Raises:
            ConfigError: an address cannot be bound.
            DynamoError: a service did not start. What had started has been stopped.
        """
        self._phase = "opening the listeners"
        try:
            if self.frontend_process is not None:
                await self.frontend_process.open()
            await self.worker_process.open(self._asked)
            await self._plane.start(self._connected)
            await self.worker_process.start_extensions(self._running)
            if self.frontend_process is not None:
                await self.frontend_process.start(self._running, self._asked)
        except BaseException:
            await self.stop(grace=False)
            raise

    async def start_workers(self) -> None:
        """Start the engines.

        Raises:
            ConfigError: a model folder cannot be used.
            DynamoError: an engine did not start, or could not be registered. What had started has been stopped. If it
                is cancelled, the worker that was starting has been; `stop` is for the rest.
        """
        self._phase = "starting the workers"
        try:
            await self.worker_process.start()
        except Exception:
            await self.stop(grace=False)
            raise

    def interrupt(self) -> None:
        """Begin nothing further while the workers start. An engine that is starting may finish, or be cancelled."""
        self.worker_process.interrupt()

    async def ready(self) -> None:
        """Return once requests can be answered; never in a process without a frontend."""
        if self.frontend_process is None:
            await asyncio.Event().wait()
        else:
            await self.frontend_process.ready()

    async def failed(self) -> None:
        """Return when the process can no longer do what it is for and should be started anew."""
        await self.worker_process.lost()

    async def stop(self, *, grace: bool = True, hurried: bool = False) -> None:
        """Stop everything in order: no new requests, running ones finish, then the workers. Safe twice.

        `hurried` does not wait for load balancers and late callers. Without `grace` running requests are cut. So they
        are when this is cancelled; everything is still closed.
        """
        if self._stopped:
            return
        self._stopped = True
        self._phase = "finishing requests"
        frontend, workers, stack = self.frontend_process, self.worker_process, self._stack
        stack.push("stop its workers", lambda: workers.stop(grace and not stack.cut, hurried=hurried))
        if frontend is not None:
            stack.push("close its listeners", frontend.close_listeners)
            stack.push("finish its requests", lambda: self._drain(frontend, grace, hurried))
        stack.push("end a reload", self._own_reload.aclose)
        try:
            await stack.aclose()
        finally:
            self._phase = stack.stage = ""
            log.info("stopped")

    async def aclose(self) -> None:
        """Stop at once: running requests are cut."""
        await self.stop(grace=False)

    async def _drain(self, frontend: FrontendProcess, grace: bool, hurried: bool) -> None:
        client = self._settings.client
        frontend.leave()
        if grace and not hurried and not self.role.whole and client.drain_grace:
            # A load balancer asks /ready now and then; until it has, requests still come and are served.
            log.info(
                "requests are taken for %g s more, until load balancers notice (client.drain_grace)", client.drain_grace
            )
            await asyncio.sleep(client.drain_grace)
        await frontend.drain(client.shutdown_timeout if grace else 0.0)
