"""The framing of a stream: its items are events, or lines of JSON."""

from __future__ import annotations

from typing import NamedTuple


class Framing(NamedTuple):
    """The content type of a stream, and the bytes that keep it alive before an item and carry nothing."""

    content_type: str
    keep_alive: bytes


EVENTS = Framing("text/event-stream", b": keep-alive\n\n")
#: Newline-delimited JSON. An empty line would be taken for an object; blanks before one may be.
LINES = Framing("application/x-ndjson", b" ")
