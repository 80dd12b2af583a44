"""Calls between the frontends of a deployment: registered in discovery, called over the transport.

Best effort: a frontend that cannot register, or sees no others, speaks for itself alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, Final

import msgspec
from dynamo_core.backoff import jitter
from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
from dynamo_core.contracts.transports.call import FRONTEND_CALL, ServedContext
from dynamo_core.contracts.transports.peers import MAX_PAYLOAD, PeerHandler, PeerReplies
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import DynamoError, InvalidArgument, NotSupported, Unknown
from dynamo_core.protocol.cards import read_frontend
from dynamo_core.protocol.decoding import UNREADABLE, Unreadable, check_depth, read, truncated
from dynamo_core.protocol.records import FRONTENDS, FrontendRecord, Instance, PeerReplyPart, PeerRequest
from dynamo_core.protocol.unreadable_warnings import UnreadableWarner
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.execution.endpoint_caller import Caller

log = logging.getLogger(__name__)

#: Seconds before discovery or the transport is tried again, varied by half.
RETRY: Final = 1.0
#: Bytes of one part of a reply.
PART: Final = 256 * 1024

_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


class PeerCalls(AsyncResource):
    """All frontends of one namespace, and the calls between them. An extension gets an `ExtensionPeers` of it."""

    def __init__(
        self, discovery: Discovery, transport: Transport, *, namespace: str, replica: int | None = None
    ) -> None:
        self._discovery = discovery
        self._transport = transport
        self._call = Caller(transport)
        self._prefix = f"{FRONTENDS}{namespace}/"
        self.own = FrontendRecord(
            frontend_id=secrets.randbits(63),
            namespace=namespace,
            pid=os.getpid(),
            host=socket.gethostname(),
            version=version("dynamo-core"),
            replica=replica,
        )
        #: One per lease: a lease that was lost may be shown for a while.
        self._own_ids = {self.own.frontend_id}
        self._handlers: dict[str, PeerHandler] = {}
        self._others: dict[str, FrontendRecord] = {}
        self._unreadable = UnreadableWarner(log, "record")
        #: Set once the others are known, as far as they ever will be.
        self._synced = asyncio.Event()
        self._tasks = TaskSet()

    def start(self) -> None:
        """Register this frontend, and begin to follow the others, if the transport reaches them."""
        if self._transport.CROSS_PROCESS:
            self._tasks.spawn(self._register(), name="register frontend")
            self._tasks.spawn(self._watch(), name="watch frontends")
        else:
            self._synced.set()

    async def aclose(self) -> None:
        """Unregister this frontend and end all calls. Safe twice, and without `start`."""
        await self._tasks.aclose()

    def frontends(self) -> Sequence[FrontendRecord]:
        """See `FrontendPeers.frontends`."""
        others = [one for one in self._others.values() if one.frontend_id not in self._own_ids]
        return sorted([self.own, *others], key=lambda one: one.frontend_id)

    def serve(self, name: str, handler: PeerHandler) -> None:
        """Answer calls named `name`.

        Raises:
            ValueError: the name is served already.
        """
        if name in self._handlers:
            raise ValueError(f"calls named {name!r} are served already")
        self._handlers[name] = handler

    def remove(self, name: str) -> None:
        """Answer no calls named `name` any more."""
        self._handlers.pop(name, None)

    async def call_all(self, name: str, payload: Any, *, timeout: float) -> PeerReplies:
        """See `FrontendPeers.call_all`."""
        request = PeerRequest(name, _encoded(payload, "the payload"))
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._synced.wait()
        except TimeoutError:
            log.warning("the other frontends are not known yet: discovery has not shown them within %g s", timeout)
        frontends = self.frontends()
        asked = {
            one.frontend_id: self._tasks.spawn(self._ask(one, request, timeout), name=f"call frontend {name}")
            for one in frontends
        }
        try:
            await asyncio.wait(asked.values(), timeout=deadline - asyncio.get_running_loop().time())
        finally:
            # One that does not end at once ends with this object; the caller waits no longer.
            for task in asked.values():
                task.cancel()
        replies: dict[int, Any] = {}
        missing: dict[int, str] = {}
        for frontend_id, task in asked.items():
            if not task.done() or task.cancelled():
                missing[frontend_id] = f"no reply within {timeout:g} s"
            else:
                value, reason = task.result()
                if reason:
                    missing[frontend_id] = reason
                else:
                    replies[frontend_id] = value
        return PeerReplies(frontends, replies, missing)

    async def _ask(self, frontend: FrontendRecord, request: PeerRequest, timeout: float) -> tuple[Any, str]:
        """Return the reply of one frontend, or why there is none."""
        try:
            if frontend.frontend_id in self._own_ids:
                # It was encoded here just now. The check of a state of a thousand workers takes milliseconds.
                return _decoder.decode(await self._reply(request)), ""
            value = read(_decoder, await self._fetch(frontend, request, timeout))
            check_depth(value)
        except DynamoError as error:
            return None, f"{error.kind}: {truncated(error.message)}"
        except Unreadable as error:
            return None, f"its reply cannot be read: {error}"
        except Exception as error:
            log.exception("frontend %016x could not be called", frontend.frontend_id)
            return None, f"{type(error).__name__}: {truncated(str(error))}"
        return value, ""

    async def _fetch(self, frontend: FrontendRecord, request: PeerRequest, timeout: float) -> bytes:
        data = bytearray()

        def take(part: object) -> None:
            if isinstance(part, PeerReplyPart):
                data.extend(part.data)
            if len(data) > MAX_PAYLOAD:
                raise InvalidArgument(f"the reply has more than {MAX_PAYLOAD} bytes")

        instance = Instance(instance_id=frontend.frontend_id, address=frontend.address, lease_ttl=frontend.lease_ttl)
        await self._call.each(instance, FRONTEND_CALL, request, take, timeout=timeout)
        return bytes(data)

    # Being called.

    async def _reply(self, request: PeerRequest) -> bytes:
        handler = self._handlers.get(request.name)
        if handler is None:
            raise NotSupported(f"this frontend does not serve calls named '{truncated(request.name)}'")
        try:
            payload = read(_decoder, request.payload)
            check_depth(payload)
        except Unreadable as error:
            raise InvalidArgument(f"the payload cannot be read: {error}") from None
        try:
            return _encoded(await handler(payload), "the reply")
        except DynamoError:
            raise
        except Exception as error:
            log.exception("the handler of calls named %s failed", truncated(request.name))
            raise Unknown(f"its handler failed: {type(error).__name__}: {error}", cause=error) from error

    async def _handle(self, request: PeerRequest, ctx: ServedContext) -> AsyncGenerator[PeerReplyPart, None]:
        """Return the handler of the endpoint."""
        return _parts(await self._reply(request))

    # Discovery.

    async def _register(self) -> None:
        warned = ""
        while True:
            try:
                async with await self._discovery.lease() as lease:
                    await self._serve_under(lease)
            except Exception as error:
                if str(error) != warned:
                    log.warning("this frontend cannot be called by others: %s", error)
                warned = str(error)
            else:
                warned = ""
            await asyncio.sleep(jitter(RETRY))

    async def _serve_under(self, lease: Lease) -> None:
        """Serve until the lease is lost."""
        async with await self._transport.serve(lease.id, FRONTEND_CALL, self._handle) as served:
            self._own_ids.add(lease.id)
            self.own = msgspec.structs.replace(
                self.own, frontend_id=lease.id, address=served.address, lease_ttl=lease.ttl
            )
            await lease.put(FRONTENDS + self.own.path, msgspec.json.encode(self.own))
            await lease.lost.wait()

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._discovery.watch(self._prefix)) as events:
                    gone = set(self._others)
                    async for event in events:
                        self._apply(event, gone)
            except Exception:
                log.exception("the watch of frontends broke off")
            await asyncio.sleep(jitter(RETRY))

    def _apply(self, event: WatchEvent, gone: set[str]) -> None:
        """Take in one event. `gone` holds the frontends of an earlier watch that this one has not shown yet."""
        key = event.key
        match event.kind:
            case WatchKind.SYNCED:
                for known in gone:
                    self._others.pop(known, None)
                gone.clear()
                self._synced.set()
            case WatchKind.PUT:
                gone.discard(key)
                self._put(key, event.value)
            case WatchKind.DELETE:
                self._unreadable.readable(key)
                self._others.pop(key, None)

    def _put(self, key: str, value: bytes) -> None:
        try:
            frontend = read_frontend(value)
            if key != FRONTENDS + frontend.path:
                raise Unreadable("it is the record of another frontend than its key says")
        except Unreadable as error:
            self._others.pop(key, None)
            self._unreadable.warn(key, error)
        else:
            self._unreadable.readable(key)
            self._others[key] = frontend


class ExtensionPeers:
    """The calls of one extension, apart from those of others: a `FrontendPeers` of core's contracts."""

    def __init__(self, calls: PeerCalls, extension: str) -> None:
        self._calls = calls
        self._extension = extension
        self._served: set[str] = set()

    @property
    def own(self) -> FrontendRecord:
        """See `FrontendPeers.own`."""
        return self._calls.own

    def frontends(self) -> Sequence[FrontendRecord]:
        """See `FrontendPeers.frontends`."""
        return self._calls.frontends()

    def serve(self, name: str, handler: PeerHandler) -> None:
        """See `FrontendPeers.serve`."""
        self._calls.serve(self._scoped(name), handler)
        self._served.add(name)

    async def call_all(self, name: str, payload: Any = None, *, timeout: float) -> PeerReplies:
        """See `FrontendPeers.call_all`."""
        return await self._calls.call_all(self._scoped(name), payload, timeout=timeout)

    def close(self) -> None:
        """End what the extension serves."""
        for name in self._served:
            self._calls.remove(self._scoped(name))
        self._served.clear()

    def _scoped(self, name: str) -> str:
        return f"{self._extension}/{name}"


def _encoded(value: Any, what: str) -> bytes:
    """Return the value as MessagePack.

    Raises:
        ValueError: MessagePack does not hold it, or it is too large.
    """
    try:
        data = _encoder.encode(value)
    except (*UNREADABLE, TypeError) as error:
        raise ValueError(f"{what} is no plain value: {error}") from None
    if len(data) > MAX_PAYLOAD:
        raise ValueError(f"{what} has {len(data)} bytes, more than {MAX_PAYLOAD}")
    return data


async def _parts(data: bytes) -> AsyncGenerator[PeerReplyPart, None]:
    for at in range(0, len(data), PART):
        yield PeerReplyPart(data[at : at + PART])
