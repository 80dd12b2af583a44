"""The framing of a stream: its items are events, or lines of JSON."""

from __future__ import annotations

from typing import NamedTuple


class Framing(NamedTuple):
    """The content type of a stream, and what breaks its silence: bytes that stand before an item and say nothing."""

    content_type: str
    keep_alive: bytes


EVENTS = Framing("text/event-stream", b": keep-alive\n\n")
#: Newline-delimited JSON. An empty line would be taken for an object; blanks before one may be.
LINES = Framing("application/x-ndjson", b" ")
