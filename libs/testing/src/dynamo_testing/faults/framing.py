"""Framing of a byte stream for the proxy: cut into frames, and put together unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class FramingError(ValueError):
    """The bytes do not follow the expected protocol."""


class Frame(NamedTuple):
    """One message: its head and its body."""

    head: bytes
    body: bytes

    @property
    def data(self) -> bytes:
        """The frame as it travels."""
        return self.head + self.body


class Splitter(Protocol):
    """Cuts one direction of one connection."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that `data` completes, in order. Read to its end before the next piece is fed.

        Raises:
            FramingError: this cannot be cut.
        """

    def rest(self) -> bytes:
        """Return what came after the last whole frame; asked for when the stream has ended."""


class Framing(Protocol):
    """The framing of one protocol, which makes splitters of its bytes."""

    def splitter(self) -> Splitter:
        """Return a fresh one, for one direction of one connection."""


@dataclass(frozen=True, slots=True)
class LengthPrefixed:
    """Frames of a protocol that writes the length of a body before it.

    `head` is the bytes that the length takes; `limit` the largest body that is taken, in bytes.
    """

    head: int = 4
    byteorder: Literal["big", "little"] = "big"
    limit: int = 64 * 1024 * 1024

    def splitter(self) -> Splitter:
        return _LengthPrefixedSplitter(self)


class _LengthPrefixedSplitter:
    def __init__(self, framing: LengthPrefixed) -> None:
        self._framing = framing
        self._held = bytearray()
        #: Bytes without which nothing can be cut off.
        self._need = framing.head

    def feed(self, data: bytes) -> Iterator[Frame]:
        framing, held = self._framing, self._held
        held += data
        at = 0
        try:
            while len(held) - at >= self._need:
                start = at + framing.head
                length = int.from_bytes(held[at:start], framing.byteorder)
                if length > framing.limit:
                    raise FramingError(f"a frame of {length} bytes was announced; at most {framing.limit} are taken")
                self._need = framing.head + length
                if len(held) - at < self._need:
                    break
                frame = Frame(bytes(held[at:start]), bytes(held[start : start + length]))
                at = start + length
                self._need = framing.head
                yield frame
        finally:
            del held[:at]

    def rest(self) -> bytes:
        return bytes(self._held)


@dataclass(frozen=True, slots=True)
class Raw:
    """No frames at all: every piece that arrives counts as one, and where they are cut is up to the network."""

    def splitter(self) -> Splitter:
        return _RawSplitter()


class _RawSplitter:
    def feed(self, data: bytes) -> Iterator[Frame]:
        yield Frame(b"", data)

    def rest(self) -> bytes:
        return b""
