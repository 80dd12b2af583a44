"""Probes: whether the process at an address lives, asked of a thread of it that needs neither event loop nor engine.

A probe is one frame over a connection of its own, and so is its answer. Both are plain where connections are encrypted:
they hold nothing that is secret. A probe proves that the caller has read the worker's record and knows the transport's
secret; an answer proves the same, and belongs to one probe.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from typing import Final, cast

from dynamo_plugin_transport_tcp.frames import HEAD, frame

#: Bytes of the number that an answer belongs to, and of a proof.
_CHALLENGE, _PROOF = 16, 32

_PROBE, _ANSWER = b"dynprobe", b"dynalive"

#: Seconds for which the event loop has not run; 0 if it runs.
_BUSY = struct.Struct(">d")

#: What every probe begins with, and nothing else that a caller says.
PROBE_START: Final = (len(_PROBE) + _CHALLENGE + _PROOF).to_bytes(HEAD, "big") + _PROBE
PROBE_BYTES: Final = len(PROBE_START) + _CHALLENGE + _PROOF
ANSWER_BYTES: Final = HEAD + len(_ANSWER) + _BUSY.size + _PROOF

#: Seconds that a probe may take.
TIMEOUT: Final = 1.0


class ProbeKey:
    """What probes of one process and their answers are proven with: its nonce, and the secret if there is one."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes | None, nonce: bytes) -> None:
        self._key = hmac.digest(secret or b"", b"dynamo-tcp-probe/1\0" + nonce, "sha256")

    def _proof(self, role: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((role, *parts)), "sha256")

    def probe(self, challenge: bytes) -> bytes:
        """A probe, as a frame."""
        return frame(_PROBE + challenge + self._proof(_PROBE, challenge))

    def read_probe(self, data: bytes) -> bytes | None:
        """The challenge of a probe; None if it is not proven. `data` has `PROBE_BYTES` bytes."""
        start, end = len(PROBE_START), len(PROBE_START) + _CHALLENGE
        challenge = data[start:end]
        genuine = data[:start] == PROBE_START and hmac.compare_digest(data[end:], self._proof(_PROBE, challenge))
        return challenge if genuine else None

    def answer(self, challenge: bytes, busy: float) -> bytes:
        """The answer to a probe, as a frame; `busy` is the seconds for which the event loop has not run."""
        said = _BUSY.pack(busy)
        return frame(_ANSWER + said + self._proof(_ANSWER, challenge, said))

    def read_answer(self, challenge: bytes, data: bytes) -> float | None:
        """The seconds in an answer; None if it is not proven, or none at all."""
        start, end = HEAD + len(_ANSWER), HEAD + len(_ANSWER) + _BUSY.size
        said = data[start:end]
        genuine = len(data) == ANSWER_BYTES and hmac.compare_digest(data[end:], self._proof(_ANSWER, challenge, said))
        return _BUSY.unpack(said)[0] if genuine else None


async def probe(host: str, port: int, key: ProbeKey) -> float | None:
    """Asks the process at an address: the seconds for which its event loop has not run, 0 if it runs.

    None if there was no answer within `TIMEOUT`, or none that is proven.
    """
    loop = asyncio.get_running_loop()
    challenge = secrets.token_bytes(_CHALLENGE)
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
        self._got += data[:ANSWER_BYTES]
        if len(self._got) >= ANSWER_BYTES:
            self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell()

    def _tell(self) -> None:
        if not self.answer.done():
            self.answer.set_result(self._got)

    def leave(self) -> None:
        """Closes the connection, if there is one."""
        if self._transport is not None:
            self._transport.abort()
