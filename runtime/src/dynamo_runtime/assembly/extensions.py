"""The extensions of a process: made, started and closed without failing a request or the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from aiohttp import web
from dynamo_core.contracts.extension import Extension, ExtensionServices, FrontendView
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.plugin import FRONTEND_ROLE, WORKER_ROLE
from dynamo_core.errors import ConfigError, Unavailable
from dynamo_core.resources import AsyncResource

from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.assembly.reload import Plan, Step
from dynamo_runtime.assembly.resolve import PickedExtension
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller

log = logging.getLogger(__name__)

#: Seconds for an extension to start, and to close.
START_TIME: Final = 10.0
CLOSE_TIME: Final = 5.0


class ProvidedServices(NamedTuple):
    """One extension's view of a frontend, and the end of services that it leaves open."""

    view: FrontendView | None = None
    withdraw: Callable[[], None] = lambda: None


class Extensions(AsyncResource):
    """The extensions that run in this process, in the order of the config.

    Raises:
        ConfigError: an extension finds its settings wrong.
    """

    def __init__(
        self,
        plane: ProcessServices,
        picked: Sequence[PickedExtension],
        provide: Callable[[str], ProvidedServices] = lambda name: ProvidedServices(),
    ) -> None:
        """`provide` gives the extension of a name what it sees of a frontend."""
        call = Caller(plane.transport)
        #: All of them, those that fail too.
        self.names = [one.name for one in picked]
        self._failures: dict[str, str] = {}
        self._made: dict[str, Extension] = {}
        self._started: set[str] = set()
        self._withdraw: dict[str, Callable[[], None]] = {}
        for one in picked:
            view, self._withdraw[one.name] = ProvidedServices() if one.role == WORKER_ROLE else provide(one.name)
            services = ExtensionServices(
                role=WORKER_ROLE if view is None else FRONTEND_ROLE,
                name=one.name,
                namespace=plane.settings.namespace,
                metrics=plane.metrics,
                metrics_prefix=plane.settings.http.metrics_prefix,
                settings=plane,
                discovery=plane.discovery,
                events=plane.events,
                call=call,
                report_failure=partial(self._report, one.name),
                load_plugin=plane.loader.load,
                frontend=view,
            )
            try:
                self._made[one.name] = one.plugin.cls(one.plugin.config, services)
            except ConfigError:
                raise
            except Exception as error:
                self._fail(one.name, "could not be made", error)

    @property
    def failures(self) -> Mapping[str, str]:
        """The failures, by the name of the extension. Empty if all is well."""
        return self._failures

    def routes(self, taken: Collection[tuple[str, str]]) -> list[HttpRoute]:
        """Return the routes of all of them. One whose method and path are `taken` fails, and serves none."""
        routes: list[HttpRoute] = []
        used = set(taken)
        for name, extension in self._made.items():
            if extension.services.frontend is None:
                continue
            try:
                own = list(extension.routes())
                for route in own:
                    # Raises what the listener would.
                    web.UrlDispatcher().add_route(route.method, route.path, route.handler)
                keys = [(route.method, route.path) for route in own]
                double = next((key for at, key in enumerate(keys) if key in used or key in keys[:at]), None)
                if double is not None:
                    raise ValueError(f"{' '.join(double)} is served already")
            except Exception as error:
                self._fail(name, "has routes that cannot be served", error)
                continue
            used.update(keys)
            routes += [self._while_started(name, route) for route in own]
        return routes

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """See `dynamo_runtime.assembly.reload.Reloadable`."""
        for name, extension in self._made.items():
            yield from plan.reconfigured(f"extensions.{name}", [extension])

    async def start(self) -> None:
        """Start those that have not failed yet, all at the same time."""
        async with asyncio.TaskGroup() as group:
            for name, extension in self._made.items():
                if name not in self._failures:
                    group.create_task(self._start(name, extension))

    async def aclose(self) -> None:
        """Close all of them at the same time; none is waited for longer than `CLOSE_TIME`. Safe twice."""
        made, self._made = self._made, {}
        async with asyncio.TaskGroup() as group:
            for name, extension in made.items():
                group.create_task(self._close(name, extension))

    async def _start(self, name: str, extension: Extension) -> None:
        try:
            async with asyncio.timeout(START_TIME):
                await extension.start()
        except TimeoutError as error:
            self._fail(name, f"did not start within {START_TIME:g} s", error)
        except Exception as error:
            self._fail(name, "did not start", error)
        else:
            self._started.add(name)
            return
        await self._close(name, extension)

    async def _close(self, name: str, extension: Extension) -> None:
        self._started.discard(name)
        try:
            async with asyncio.timeout(CLOSE_TIME):
                await extension.aclose()
        except TimeoutError:
            log.warning("extension %s was not closed within %g s", name, CLOSE_TIME)
        except Exception:
            log.exception("extension %s could not be closed", name)
        finally:
            self._withdraw[name]()

    def _while_started(self, name: str, route: HttpRoute) -> HttpRoute:
        """Return the route, as long as its extension runs."""
        handler = route.handler

        async def handle(http: web.Request) -> web.StreamResponse:
            if name not in self._started:
                raise Unavailable(f"extension {name!r} does not run")
            return await handler(http)

        return replace(route, handler=handle)

    def _fail(self, name: str, what: str, error: Exception) -> None:
        log.error("extension %s %s", name, what, exc_info=error)
        self._failures[name] = f"{what}: {error}" if str(error) else what

    def _report(self, name: str, reason: str) -> None:
        """Record the fault that an extension reports of itself; empty: none any more."""
        if reason:
            log.error("extension %s: %s", name, reason)
            self._failures[name] = reason
        elif self._failures.pop(name, None) is not None:
            log.info("extension %s works again", name)
