"""Frames: a head, then a body. A length over the limit is found before the body.

The head is four bytes of length, big-endian. Once both ends have agreed on checksums, twelve more follow, which the
length counts: the length with all its bits turned over, so that a length that was damaged is not waited for, and a
checksum of the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from dynamo_core.errors import Disconnected
from dynamo_wire import checksum

HEAD = 4

_CHECKED = Struct(">IIQ")
_CHECK = _CHECKED.size - HEAD
_ALL_BITS = 0xFFFFFFFF


class FrameError(Disconnected):
    """The other end sent a malformed frame; the connection is unusable."""


class DamagedFrame(FrameError):
    """A frame differs from the one that was sent."""


def frame(body: bytes) -> bytes:
    """Return the body as a frame."""
    return len(body).to_bytes(HEAD, "big") + body


def checked_frame(body: bytes) -> bytes:
    """Return the body as a frame with a checksum."""
    length = len(body) + _CHECK
    return _CHECKED.pack(length, length ^ _ALL_BITS, checksum(body)) + body


class FrameSplitter:
    """A splitter of incoming bytes, however cut, into bodies of frames. Holds at most one unfinished frame.

    `limit` is the largest body in bytes, and may be changed between frames; so may it be begun to `check` them.
    """

    __slots__ = ("_checked", "_head", "_need", "_partial", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._checked = False
        self._head = HEAD
        self._partial = bytearray()
        self._need = 0

    @property
    def held(self) -> int:
        """Bytes of the unfinished frame."""
        return len(self._partial)

    def check(self) -> None:
        """Expect checksums from the next frame on."""
        self._checked = True
        self._head = _CHECKED.size

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Yield the bodies that `data` completes, in order. Must be read to its end before the next piece is fed.

        Raises:
            FrameError: a length is over the limit. Nothing of that frame has been kept.
            DamagedFrame: a length or a body is not what was sent.
        """
        partial = self._partial
        if partial:
            partial += data
            if len(partial) < self._need:
                return
            # Bodies are views, and what is viewed cannot be resized: so they are views of a copy.
            data = bytes(partial)
            partial.clear()
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= self._head:
            checked = self._checked
            if checked:
                length, turned, check = _CHECKED.unpack_from(view, at)
                if length ^ turned != _ALL_BITS or length < _CHECK:
                    raise DamagedFrame(f"the head of a frame is not what was sent: a length of {length} bytes")
                length -= _CHECK
            else:
                length = int.from_bytes(view[at : at + HEAD], "big")
            if length > self.limit:
                raise FrameError(f"a frame of {length} bytes was announced; at most {self.limit} are taken")
            start = at + self._head
            stop = start + length
            if stop > end:
                self._need = stop - at
                break
            body = view[start:stop]
            if checked and checksum(body) != check:
                raise DamagedFrame(f"a frame of {length} bytes is not what was sent: its checksum differs")
            yield body
            at = stop
        else:
            self._need = self._head
        if at < end:
            partial += view[at:]
