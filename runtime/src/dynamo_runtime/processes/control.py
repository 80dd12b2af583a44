"""The line between a supervisor and its children: a pair of sockets.

The parent sends wishes and, by closing, tells of its death; the child says once that it serves, or why it cannot. Both
may ask the other something meanwhile: a question and its answer are frames, which begin with a word of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from itertools import count
from typing import Any, Self

import msgspec
from dynamo_core.errors import Disconnected, ResponseTimeout
from dynamo_core.protocol.decoding import Unreadable, read
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.processes.reaper import MARK
from dynamo_runtime.processes.signals import Signals, give_up

log = logging.getLogger(__name__)

#: Tells a child the descriptor of its end of the line.
VARIABLE = "DYN_SUPERVISOR_FD"

#: The wish to end without the patience for load balancers and late callers.
HURRY = b"h"
#: The wish to cut what still runs.
CUT = b"c"
#: What a child says once it serves.
READY = b"r"
#: What stands before the reason why a child cannot run with its config; and the most bytes of both.
REASON = b"x"
LONGEST_REASON = 4096
#: The words that begin a frame: a question, and the answer to one. The length of the rest follows, in so many bytes.
QUESTION = b"q"
ANSWER = b"a"
LENGTH = 4

#: Seconds that a child whose parent has died may take to end.
ORPHAN_GRACE = 3.0

#: Answers a question of the other end. Both are plain data.
Answerer = Callable[[Any], Awaitable[Any]]


class _Message(msgspec.Struct, frozen=True):
    """A question, or the answer with the same number."""

    number: int
    body: Any


_decoder = msgspec.json.Decoder(_Message)
_encoder = msgspec.json.Encoder()


def supervisor_descriptor(env: MutableMapping[str, str] | None = None) -> int | None:
    """Return the descriptor of the line, if this process was started by a supervisor.

    Taken out of the environment: a process that an engine starts is not the supervisor's.
    """
    env = os.environ if env is None else env
    env.pop(MARK, None)
    value = env.pop(VARIABLE, "")
    return int(value) if value.isdigit() else None


class _Exchange:
    """The pending questions of both ends: those without an answer, and those being answered."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks = TaskSet()
        self._closed = False
        self.answerer: Answerer | None = None

    async def ask(self, body: Any, timeout: float) -> Any:
        if self._closed:
            raise Disconnected("the process is gone")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(_frame(QUESTION, _Message(number, body)))
        try:
            async with asyncio.timeout(timeout):
                return await waiting
        except TimeoutError:
            raise ResponseTimeout(f"no answer within {timeout:g} s") from None
        finally:
            del self._waiting[number]

    def received(self, word: bytes, data: bytes) -> None:
        try:
            message = read(_decoder, data)
        except Unreadable as error:
            log.warning("what came over the line of the supervisor cannot be read: %s", error)
            return
        if word == QUESTION:
            self._tasks.spawn(self._answer(message), name="answer over the line")
        elif (waiting := self._waiting.get(message.number)) is not None and not waiting.done():
            waiting.set_result(message.body)

    async def _answer(self, message: _Message) -> None:
        body = None if self.answerer is None else await self.answerer(message.body)
        self._send(_frame(ANSWER, _Message(message.number, body)))

    def end(self) -> None:
        """End: the other end is gone and answers no more."""
        self._closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Disconnected("the process is gone"))

    async def aclose(self) -> None:
        self.end()
        await self._tasks.aclose()


def _frame(word: bytes, message: _Message) -> bytes:
    data = _encoder.encode(message)
    return word + len(data).to_bytes(LENGTH, "big") + data


class ParentPipe(AsyncResource):
    """The child's end. A thread reads it, so that a busy or stuck event loop does not keep an orphan alive."""

    def __init__(self, descriptor: int, signals: Signals) -> None:
        self._descriptor = descriptor
        self._signals = signals
        self._loop = asyncio.get_running_loop()
        self._exchange = _Exchange(self._write)

    def start(self) -> None:
        """Begin to listen. The thread ends with the process."""
        threading.Thread(target=self._listen, name="parent pipe", daemon=True).start()

    async def aclose(self) -> None:
        """End what is asked and answered; wishes are still heard."""
        await self._exchange.aclose()

    def say_ready(self) -> None:
        """Tell the supervisor that this process serves: its config works."""
        self._write(READY)

    def say_reason(self, reason: str) -> None:
        """Tell the supervisor why this process cannot run with its config."""
        self._write((REASON + reason.encode("utf-8", "replace"))[:LONGEST_REASON])

    def answer_with(self, answerer: Answerer) -> None:
        """Answer questions of the supervisor from now on; before, the answer is null."""
        self._exchange.answerer = answerer

    async def ask(self, body: Any, timeout: float) -> Any:
        """Return what the supervisor answers.

        Raises:
            DynamoError: it does not within `timeout` seconds.
        """
        return await self._exchange.ask(body, timeout)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _listen(self) -> None:
        while True:
            data = self._read(1)
            # The deadline here and now: the loop may be what does not go on.
            if data == CUT:
                self._signals.expect_end()
                self._send(self._signals.cut)
            elif data in (HURRY, b""):
                self._signals.expect_end(hurried=True)
                self._send(self._signals.arrived, True)
            elif data in (QUESTION, ANSWER):
                length = int.from_bytes(self._read(LENGTH), "big")
                self._send(self._exchange.received, data, self._read(length))
            if not data:
                timer = threading.Timer(ORPHAN_GRACE, give_up, ["the supervisor is gone"])
                timer.daemon = True
                timer.start()
                return

    def _read(self, size: int) -> bytes:
        """Return so many bytes; fewer at the end of the stream."""
        data = b""
        with suppress(OSError):
            while len(data) < size and (more := os.read(self._descriptor, size - len(data))):
                data += more
        return data

    def _send(self, what: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending already.
            return


class ChildLine:
    """The parent's end. It never waits: unread messages are kept in order."""

    def __init__(self, end: socket.socket, answerer: Answerer | None = None) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._heard = bytearray()
        self._unsent = bytearray()
        self._reason: bytearray | None = None
        self._served = False
        self._exchange = _Exchange(self.say)
        self._exchange.answerer = answerer
        self._loop.add_reader(end, self._listen)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._exchange.aclose()
        self._forget()
        self._end.close()

    def has_served(self) -> bool:
        """Return whether the child has said that it serves; still known after its end."""
        self._listen()
        return self._served

    def reason(self) -> str:
        """Return why the child cannot run with its config, once it has ended, as far as it could say."""
        self._listen()
        return "" if self._reason is None else self._reason.decode("utf-8", "replace")

    def say(self, words: bytes) -> None:
        """Tell the child something; one that is gone does not mind."""
        self._unsent += words
        self._flush()

    async def ask(self, body: Any, timeout: float) -> Any:
        """Return what the child answers.

        Raises:
            Disconnected: it has ended.
            ResponseTimeout: it does not answer within `timeout` seconds.
        """
        return await self._exchange.ask(body, timeout)

    def _flush(self) -> None:
        try:
            del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            log.debug("a process does not listen any more")
            self._unsent.clear()
        if self._end.fileno() < 0:
            return
        if self._unsent:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    def _listen(self) -> None:
        """Take in what is there, without waiting."""
        try:
            while more := self._end.recv(LONGEST_REASON):
                self._heard += more
                self._take()
        except BlockingIOError:
            return
        except OSError:
            pass
        self._exchange.end()
        self._forget()

    def _forget(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)

    def _take(self) -> None:
        heard = self._heard
        while heard:
            word = bytes(heard[:1])
            if self._reason is not None:
                self._reason += heard[: LONGEST_REASON - len(self._reason)]
                heard.clear()
            elif word in (QUESTION, ANSWER):
                begin = 1 + LENGTH
                end = begin + int.from_bytes(heard[1:begin], "big")
                if len(heard) < begin or len(heard) < end:
                    return
                self._exchange.received(word, bytes(heard[begin:end]))
                del heard[:end]
            else:
                self._served = self._served or word == READY
                self._reason = bytearray() if word == REASON else None
                del heard[:1]
