"""A worker's records in discovery, and the state that operators set in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec
from dynamo_core.contracts.discovery import Lease
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import DynamoError, EngineShutdown, InvalidArgument, Unavailable
from dynamo_core.protocol.cards import check_state
from dynamo_core.protocol.decoding import Unreadable
from dynamo_core.protocol.records import (
    CARDS,
    INSTANCES,
    SERVING,
    Instance,
    ModelCard,
    WorkerStateReport,
    WorkerStateRequest,
)

from dynamo_runtime.worker.capacity_gate import CapacityGate

log = logging.getLogger(__name__)


class Registration:
    """The records of one worker, under its lease. They change one at a time, and no more after `leave`."""

    def __init__(self, lease: Lease, gate: CapacityGate, *, notice: float) -> None:
        """`gate` counts the worker's requests. `notice` is in how many seconds callers have noticed a new record."""
        self._lease = lease
        self._gate = gate
        self._notice = notice
        self._card: ModelCard | None = None
        self._instance: Instance | None = None
        self._listed = False
        self._left = False
        self._changing = asyncio.Lock()
        #: When it has gone out of service, by the loop's clock.
        self._closed_at: float | None = None

    @property
    def instance(self) -> Instance | None:
        """The record, once it has been put."""
        return self._instance

    @property
    def notice_left(self) -> float:
        """For how many seconds there may be callers that take the worker for one that takes new requests."""
        if self._closed_at is None:
            return self._notice
        return max(0.0, self._closed_at + self._notice - asyncio.get_running_loop().time())

    async def enter(self, card: ModelCard, instance: Instance) -> None:
        """Put the records."""
        # The card is there slightly before the instance, so that no frontend sees an instance without a model.
        await self._lease.put(CARDS + card.path, msgspec.json.encode(card))
        await self._put(instance)
        self._card, self._instance, self._listed = card, instance, True

    async def set_listed(self, listed: bool) -> None:
        """Show the worker to frontends, or take it from their sight."""
        async with self._changing:
            if self._left or self._instance is None:
                return
            if listed:
                await self._put(self._instance)
            else:
                await self._lease.remove(INSTANCES + self._instance.path)
            self._listed = listed

    async def leave(self) -> None:
        """Remove the records, after a change that is under way."""
        async with self._changing:
            self._left = True
            if self._instance is not None and self._card is not None:
                await self._lease.remove(INSTANCES + self._instance.path)
                await self._lease.remove(CARDS + self._card.path)

    # What operators ask, by way of a frontend.

    async def serve(self, request: WorkerStateRequest, ctx: ServedContext) -> AsyncGenerator[WorkerStateReport, None]:
        """Return the handler of ``worker_state``: takes the state, if one is asked for, and reports.

        Raises:
            InvalidArgument: no worker can be in this state.
            EngineShutdown: the worker is starting or stopping.
            Unavailable: the record cannot be put now; the state is as it was.
        """
        if request.state is None:
            return self._reports(self._registered().state)
        async with self._changing:
            instance = await self._set_state(self._registered(), request.state)
        return self._reports(instance.state)

    def _registered(self) -> Instance:
        if self._left or self._instance is None:
            raise EngineShutdown(f"the worker is {'stopping' if self._left else 'starting'}")
        return self._instance

    async def _set_state(self, instance: Instance, state: str) -> Instance:
        try:
            check_state(state)
        except Unreadable as error:
            raise InvalidArgument(str(error), field="state") from None
        changed = msgspec.structs.replace(instance, state=state)
        if self._listed:
            # Also where it is the same: a store that failed may have kept a record that it did not confirm.
            try:
                await self._put(changed)
            except (DynamoError, ValueError) as error:
                raise Unavailable(f"discovery does not take the record of worker {instance.worker} now") from error
        self._instance = changed
        if state == SERVING:
            self._closed_at = None
        elif self._closed_at is None:
            self._closed_at = asyncio.get_running_loop().time()
        if state != instance.state:
            log.info("worker %s is %s", instance.worker, state or "in service again")
        return changed

    async def _reports(self, state: str) -> AsyncGenerator[WorkerStateReport, None]:
        requests = self._gate.active + self._gate.queued
        drained = state != SERVING and not requests and not self.notice_left
        yield WorkerStateReport(state, requests, drained)

    async def _put(self, instance: Instance) -> None:
        await self._lease.put(INSTANCES + instance.path, msgspec.json.encode(instance))
