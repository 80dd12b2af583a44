"""``/admin/workers``: the workers that a frontend sees, and their states, which operators change.

A worker keeps its state itself, in its record in discovery: the frontend that is asked only asks the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.router import EndpointCaller
from dynamo_core.contracts.transports.call import WORKER_STATE
from dynamo_core.errors import DynamoError, HttpFault, Unavailable
from dynamo_core.protocol.decoding import truncated
from dynamo_core.protocol.ids import format_instance_id
from dynamo_core.protocol.records import (
    CORDONED,
    DRAINING,
    SERVING,
    Instance,
    ModelCard,
    WorkerStateReport,
    WorkerStateRequest,
)

from dynamo_runtime.dispatch.models.models import Models

PATH = "/admin/workers"
#: Seconds that a worker has to report, and to change its record.
REPORT_TIMEOUT = 2.0
CHANGE_TIMEOUT = 10.0
#: Seconds for a change to come back from the store.
FOLLOW = 1.0
#: Workers that are asked at a time.
ASKED_AT_ONCE = 64

#: Replicas that a message names.
_NAMED = 8
_HOW_TO_NAME = "give an id or NAME-REPLICA, as `dynamo workers` lists them"

_Worker = tuple[ModelCard, Instance]


class WorkerRoutes:
    """The routes, for the workers in one frontend's view of discovery."""

    def __init__(self, models: Models, call: EndpointCaller) -> None:
        self._models = models
        self._call = call

    def routes(self) -> Iterable[HttpRoute]:
        """Return all of them, on the operators' listener."""
        admin = ListenerName.ADMIN
        one = f"{PATH}/{{id}}"
        act = partial(HttpRoute, "POST", listener=admin, acts=True)
        return [
            HttpRoute("GET", PATH, self._list, "The workers, their states and what they run", admin),
            HttpRoute("GET", one, self._show, "One worker; {id} is its id or NAME-REPLICA", admin),
            act(f"{one}/cordon", self._set(CORDONED), "Sends a worker no new requests"),
            act(f"{one}/uncordon", self._set(SERVING), "Sends a worker requests again"),
            act(f"{one}/drain", self._set(DRAINING), "Has a worker finish what it has and stay"),
        ]

    async def _list(self, http: web.Request) -> web.Response:
        workers = sorted(self._workers(), key=lambda pair: (pair[1].worker, pair[1].replica, pair[0].path))
        permits = asyncio.Semaphore(ASKED_AT_ONCE)

        async def entry(worker: _Worker) -> dict[str, Any]:
            async with permits:
                return await self._entry(worker)

        return _json({"workers": await asyncio.gather(*map(entry, workers))})

    async def _show(self, http: web.Request) -> web.Response:
        return _json(await self._entry(self._find(http.match_info["id"])))

    def _set(self, state: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            card, instance = self._find(http.match_info["id"])
            try:
                report = await self._ask(instance, WorkerStateRequest(state), CHANGE_TIMEOUT)
            except Unavailable:
                raise
            except DynamoError as error:
                worker = format_instance_id(instance.instance_id)
                raise Unavailable(f"worker {worker} cannot be asked: {error}") from error
            await self._follow(instance.instance_id, state)
            return _json(_entry(card, msgspec.structs.replace(instance, state=state), report))

        return handle

    async def _entry(self, worker: _Worker) -> dict[str, Any]:
        """Return what is known of a worker: its records, and what it reports if it does."""
        card, instance = worker
        try:
            report = await self._ask(instance, WorkerStateRequest(), REPORT_TIMEOUT)
        except DynamoError:
            report = None
        return _entry(card, instance, report)

    async def _ask(self, instance: Instance, request: WorkerStateRequest, timeout: float) -> WorkerStateReport:
        (report,) = await self._call(instance, WORKER_STATE, request, timeout=timeout)
        return cast(WorkerStateReport, report)

    def _workers(self) -> Sequence[_Worker]:
        if not self._models.synced:
            raise Unavailable("the first snapshot of discovery is not in yet")
        return self._models.workers()

    def _find(self, text: str) -> _Worker:
        """Return the worker that is meant by its id, or by its name and the number of its replica."""
        found = [pair for pair in self._workers() if text.lower() in _names(pair[1])]
        if not found:
            replicas = sorted(_names(one)[1] for _, one in self._workers() if one.worker.lower() == text.lower())
            known = f"give one of {', '.join(replicas[:_NAMED])}" if replicas else _HOW_TO_NAME
            raise HttpFault(404, f"no worker {truncated(text)!r} is registered: {known}")
        if len(found) > 1:
            ids = ", ".join(format_instance_id(instance.instance_id) for _, instance in found)
            raise HttpFault(409, f"{len(found)} workers are called {truncated(text)!r}: give the id of one of {ids}")
        return found[0]

    async def _follow(self, instance_id: int, state: str) -> None:
        """Return once this frontend goes by the new state, or the worker has gone, or it takes too long."""
        try:
            async with asyncio.timeout(FOLLOW):
                while any(one.instance_id == instance_id and one.state != state for _, one in self._models.workers()):
                    await self._models.changed()
        except TimeoutError:
            pass


def _names(instance: Instance) -> Sequence[str]:
    return format_instance_id(instance.instance_id), f"{instance.worker}-{instance.replica}".lower()


def _entry(card: ModelCard, instance: Instance, report: WorkerStateReport | None) -> dict[str, Any]:
    return {
        "id": format_instance_id(instance.instance_id),
        "worker": instance.worker,
        "replica": instance.replica,
        "model": card.name,
        "role": card.worker_type,
        "state": instance.state_name,
        "requests": report.requests if report is not None else None,
        "drained": report.drained if report is not None else None,
        "host": instance.host,
        "pid": instance.pid,
        "system_url": instance.system_url,
        "version": instance.version or None,
        "started": instance.started or None,
    }


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
