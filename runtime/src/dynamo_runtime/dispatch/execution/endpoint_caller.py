"""Calls to an endpoint of one given worker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import ResponseTimeout
from dynamo_core.protocol.records import Instance

from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream


class Caller:
    """See `dynamo_core.contracts.router.EndpointCaller`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._flush = FlushQueue()

    async def __call__(self, instance: Instance, endpoint: Endpoint, request: object, *, timeout: float) -> list[Any]:
        """Return all items of the stream; `timeout` in seconds bounds the whole call."""
        items: list[Any] = []
        await self.each(instance, endpoint, request, items.append, timeout=timeout)
        return items

    async def each(
        self,
        instance: Instance,
        endpoint: Endpoint,
        request: object,
        take: Callable[[Any], None],
        *,
        timeout: float,
    ) -> None:
        """Give each item to `take` as it comes; an error that `take` raises ends the call and is raised here."""
        stream = ResponseStream(None, self._flush)
        ctx = EngineContext(str(uuid.uuid4()))
        try:
            async with asyncio.timeout(timeout), aclosing(stream):
                source = await self._transport.call(instance, endpoint, request, ctx, stream.begin())
                stream.attach(source, instance.instance_id)
                async for item in stream:
                    take(item)
        except TimeoutError as error:
            raise ResponseTimeout(
                f"endpoint {endpoint.name!r} of {instance.instance_id:016x} took longer than {timeout} s", cause=error
            ) from error
