"""The request plane: the transport contract for calls to a worker and their streams."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from dynamo_core.contracts.plugin import ConnectingPlugin
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint, Handler, Sink, Source
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.protocol.records import Instance
from dynamo_core.resources import AsyncResource


class Served(AsyncResource):
    """An endpoint being served."""

    @property
    @abstractmethod
    def address(self) -> dict[str, str]:
        """The address in the instance's record by which callers find the endpoint, under the transport's name."""

    @abstractmethod
    async def drain(self, timeout: float) -> bool:
        """Refuse new calls and wait up to `timeout` seconds for running ones; whether all ended by themselves."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop serving and end what still runs. Safe twice."""


class Transport(ConnectingPlugin):
    """Carries calls. One object per process, used by workers to serve and by clients to call.

    A stream ends normally only after an `Annotated` whose event is ``complete_final`` has been put into the sink; every
    other end is reported to `Sink.closed`.
    """

    @abstractmethod
    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        """Serve `endpoint` of the worker `instance_id` until the result is closed."""

    @abstractmethod
    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        """Call an endpoint of one worker and return once the worker has accepted.

        Stopping `ctx` stops the handler's context, as an explicit request. Once this returns the sink is fed, and
        `Sink.closed` is called exactly once. If this raises, the sink has not been touched. `Sink.event` and
        `Sink.closed` are called in a copy of the context (`contextvars`) in which this was; `Sink.data` in that or in
        an empty one, so that what is logged there carries no other request's ids.

        Raises:
            CannotConnect, ConnectionTimeout: the worker was not reached; nothing was started.
            WorkerOverloaded, InvalidArgument, EngineShutdown, …: the worker's own refusal, with its type.
        """

    @abstractmethod
    def events(self) -> EventPlane:
        """Return the event plane that comes with this transport."""

    @abstractmethod
    async def aclose(self) -> None:
        """End all calls and close everything. Safe twice, and without `start`."""
