"""The rendezvous of decode and prefill mockers of one process, when the caller starts both halves at once.

A real engine opens a port, at which the other half finds it from anywhere. Here nothing listens: the address is looked
up in this process, and a decode worker that does not find it takes the prompt as computed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_core import BackendError, GenerateContext

from dynamo_plugin_engine_mocker.sequence import Sequence

#: Rooms that one prefill worker keeps for decode workers that have not come; the oldest are given up.
MAX_ROOMS = 4096

#: Seconds that a decode worker waits in a room.
PREFILL_TIMEOUT = 60.0

# The engines of a process know nothing of each other; this is what an address is for.
_rooms_by_address: dict[tuple[str, int], BootstrapRooms] = {}


class BootstrapRooms:
    """The rooms of one prefill worker, by the caller's number. In each, one prompt becomes computed, or lost."""

    def __init__(self, host: str, port: int, *, timeout: float = PREFILL_TIMEOUT) -> None:
        """Open them to this process.

        Raises:
            BackendError.InvalidArgument: another prefill worker of this process has the address.
        """
        self._address = (host, port)
        self._timeout = timeout
        self._rooms: OrderedDict[int, asyncio.Future[bool]] = OrderedDict()
        if self._address in _rooms_by_address:
            raise BackendError.InvalidArgument(
                f"bootstrap_port: {host}:{port} is that of another prefill worker of this process; choose another"
            )
        _rooms_by_address[self._address] = self

    @staticmethod
    def find(host: str, port: int) -> BootstrapRooms | None:
        """Return those at an address; None if no prefill worker of this process has it."""
        return _rooms_by_address.get((host, port))

    def __len__(self) -> int:
        return len(self._rooms)

    def close(self) -> None:
        """Free the address and fail all waiting decode workers: their prompts are lost. Safe twice."""
        if _rooms_by_address.get(self._address) is self:
            del _rooms_by_address[self._address]
        for number in [*self._rooms]:
            self._resolve(number, computed=False)
        self._rooms.clear()

    @contextmanager
    def hosting(self, number: int, sequence: Sequence) -> Iterator[None]:
        """Wrap the prefill of a prompt: on exit the prompt is computed, or else lost."""
        self._room(number)
        try:
            yield
        finally:
            self._resolve(number, computed=sequence.finished)

    async def wait_for_prefill(self, number: int, ctx: GenerateContext) -> bool:
        """Wait until the prompt of a room is computed; False if the request was stopped before.

        Raises:
            BackendError.Disconnected: the prefill ended without it.
            BackendError.ConnectionTimeout: it took too long.
        """
        room = self._room(number)
        waiter = asyncio.get_running_loop().create_future()

        def wake(_: object = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        room.add_done_callback(wake)
        forget = ctx.on_stop(wake)
        try:
            async with asyncio.timeout(self._timeout):
                await waiter
        except TimeoutError:
            raise BackendError.ConnectionTimeout(
                f"the prefill of bootstrap room {number} did not end within {self._timeout:g} s"
            ) from None
        finally:
            forget()
            room.remove_done_callback(wake)
            self._rooms.pop(number, None)
        if ctx.is_stopped():
            return False
        if not room.result():
            raise BackendError.Disconnected(f"the prefill of bootstrap room {number} was given up")
        return True

    def _room(self, number: int) -> asyncio.Future[bool]:
        room = self._rooms.get(number)
        if room is None:
            room = self._rooms[number] = asyncio.get_running_loop().create_future()
            if len(self._rooms) > MAX_ROOMS:
                self._resolve(next(iter(self._rooms)), computed=False)
                self._rooms.popitem(last=False)
        return room

    def _resolve(self, number: int, *, computed: bool) -> None:
        # No worker is left in a room that the decode half has joined and left.
        room = self._rooms.get(number)
        if room is not None and not room.done():
            room.set_result(computed)
