"""Probes of a process's liveness, answered by a thread that needs neither event loop nor engine.

A probe is one frame over a connection of its own, and so is its answer. Both are plain where connections are encrypted:
they hold nothing that is secret. A probe proves that the caller has read the worker's record and knows the transport's
secret; an answer proves the same, and belongs to one probe.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import Final, cast

import msgspec
from dynamo_wire import UNREADABLE

from dynamo_plugin_transport_tcp.frames import HEAD
from dynamo_plugin_transport_tcp.messages import PROBE_BYTES, Alive, Probe, pack
from dynamo_plugin_transport_tcp.security import CALLER, LISTENER, proven

_MAGIC: Final = b"dynamo-tcp-probe"

_PROOF: Final = 32

_probe_decoder = msgspec.msgpack.Decoder(Probe)
_answer_decoder = msgspec.msgpack.Decoder(Alive)

_EMPTY: Final = pack(Probe(_MAGIC, bytes(PROBE_BYTES), bytes(_PROOF)))
#: What every probe begins with, and nothing else that a caller says; and how long a probe and its answer are.
PROBE_START: Final = _EMPTY[: _EMPTY.index(_MAGIC) + len(_MAGIC)]
PROBE_LENGTH: Final = len(_EMPTY)
ANSWER_LENGTH: Final = len(pack(Alive(0.0, bytes(_PROOF))))

#: Seconds that a probe may take.
TIMEOUT: Final = 1.0


class ProbeKey:
    """The key of probes and answers of one process: its nonce, and the secret if there is one."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes | None, nonce: bytes) -> None:
        self._key = hmac.digest(secret or b"", _MAGIC + b"/1\0" + nonce, "sha256")

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join(parts), "sha256")

    def _of_answer(self, challenge: bytes, busy: float) -> bytes:
        return self._proof(LISTENER, challenge, busy.hex().encode())

    def probe(self, challenge: bytes) -> bytes:
        """Return a probe, as a frame."""
        return pack(Probe(_MAGIC, challenge, self._proof(CALLER, challenge)))

    def read_probe(self, data: bytes) -> bytes | None:
        """Return the challenge of a probe, from a frame; None if it is not proven, or none at all."""
        try:
            given = _probe_decoder.decode(data[HEAD:])
        except UNREADABLE:
            return None
        return given.challenge if proven(self._proof(CALLER, given.challenge), given.proof) else None

    def answer(self, challenge: bytes, busy: float) -> bytes:
        """Return the answer to a probe, as a frame; `busy` is the seconds for which the event loop has not run."""
        return pack(Alive(busy, self._of_answer(challenge, busy)))

    def read_answer(self, challenge: bytes, data: bytes) -> float | None:
        """Return the seconds in an answer, from a frame; None if it is not proven, or none at all."""
        try:
            given = _answer_decoder.decode(data[HEAD:])
        except UNREADABLE:
            return None
        return given.busy if proven(self._of_answer(challenge, given.busy), given.proof) else None


async def probe(host: str, port: int, key: ProbeKey) -> float | None:
    """Ask the process at an address: the seconds for which its event loop has not run, 0 if it runs.

    None if there was no answer within `TIMEOUT`, or none that is proven.
    """
    loop = asyncio.get_running_loop()
    challenge = secrets.token_bytes(PROBE_BYTES)
    asking = _Asking(key.probe(challenge), loop.create_future())
    try:
        async with asyncio.timeout(TIMEOUT):
            await loop.create_connection(lambda: asking, host, port)
            data = await asking.answer
    except OSError:
        return None
    finally:
        asking.leave()
    return key.read_answer(challenge, data)


class _Asking(asyncio.Protocol):
    """The connection of one probe."""

    def __init__(self, said: bytes, answer: asyncio.Future[bytes]) -> None:
        self.answer = answer
        self._said = said
        self._got = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._said)

    def data_received(self, data: bytes) -> None:
        self._got += data[:ANSWER_LENGTH]
        if len(self._got) >= ANSWER_LENGTH:
            self._set_answer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_answer()

    def _set_answer(self) -> None:
        if not self.answer.done():
            self.answer.set_result(self._got)

    def leave(self) -> None:
        """Close the connection, if there is one."""
        if self._transport is not None:
            self._transport.abort()
