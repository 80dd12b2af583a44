"""Frames: four bytes of length, big-endian, then that many bytes. A length over the limit is found before the body."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_core.errors import Disconnected

HEAD = 4


class FrameError(Disconnected):
    """The other end sent what cannot be understood; the connection is of no more use."""


def frame(body: bytes) -> bytes:
    """The body as a frame."""
    return len(body).to_bytes(HEAD, "big") + body


class FrameSplitter:
    """Cuts what arrives, in whatever pieces, into bodies of frames. Holds at most one unfinished frame.

    `limit` is the largest body in bytes and may be changed between frames.
    """

    __slots__ = ("_need", "_partial", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._partial = bytearray()
        self._need = 0

    @property
    def held(self) -> int:
        """Bytes of the unfinished frame."""
        return len(self._partial)

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The bodies that `data` completes, in order. Must be read to its end before the next piece is fed.

        Raises:
            FrameError: a length is over the limit. Nothing of that frame has been kept.
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
        while end - at >= HEAD:
            length = int.from_bytes(view[at : at + HEAD], "big")
            if length > self.limit:
                raise FrameError(f"a frame of {length} bytes was announced; at most {self.limit} are taken")
            stop = at + HEAD + length
            if stop > end:
                self._need = HEAD + length
                break
            yield view[at + HEAD : stop]
            at = stop
        else:
            self._need = HEAD
        if at < end:
            partial += view[at:]
