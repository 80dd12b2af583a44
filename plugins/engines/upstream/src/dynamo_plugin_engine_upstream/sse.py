"""Server-sent events: from bytes, however cut, to the data of each event."""

from __future__ import annotations

import re

from dynamo_core import BackendError

#: What ends a stream.
DONE = b"[DONE]"
#: The most bytes of one event. No answer has larger pieces; a stream without line ends would.
LARGEST = 16 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventDecoder:
    """A decoder of bytes into the data of whole events. Comments and fields other than data are left out."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each event that these bytes complete.

        Raises:
            BackendError.StreamIncomplete: an event is longer than any can be.
        """
        text = self._rest + received
        # A carriage return at the end may be half of a line end.
        held = text.endswith(b"\r")
        lines = _LINE_END.split(text[:-1] if held else text)
        self._rest = lines.pop() + (b"\r" if held else b"")
        found: list[bytes] = []
        data = self._data
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and data:
                found.append(b"\n".join(data))
                data.clear()
        if len(self._rest) + sum(map(len, data)) > LARGEST:
            raise BackendError.StreamIncomplete(f"the server sent an event of more than {LARGEST} bytes")
        return found

    def end(self) -> list[bytes]:
        """Return the data of an event that only the end of the stream ended, as some servers leave it."""
        return self.feed(b"\n\n")
