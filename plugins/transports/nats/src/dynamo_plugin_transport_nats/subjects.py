"""Subjects: where a worker, a caller and the events of a source are listened to.

====================================  ==================================================================
``P.rq.<instance>.<run>``             the address of a worker in its record: instance id and run, in hex
``P.rq.<instance>.<run>.<link>``      what one caller sends to it
``P.cl.<link>``                       what the worker sends to that caller
``P.ev.<subject>.<source>``           the events of one source on one subject
====================================  ==================================================================

`P` is the prefix of the settings, a link is ``<caller>.<number>``: a caller's run in hex, and a count of its links.
"""

from __future__ import annotations

import re

#: Bytes of the number that tells one run of a process from every other.
NONCE_BYTES = 12

#: The longest subject that is taken from elsewhere.
LONGEST = 512

_LINK = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}\.[0-9]{{1,18}}")
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_SOURCE = re.compile(r"[0-9a-f]{1,16}")


class Subjects:
    """Makes the subjects under one prefix, and takes them apart."""

    def __init__(self, prefix: str) -> None:
        self._workers = f"{prefix}.rq."
        self._callers = f"{prefix}.cl."
        self._events = f"{prefix}.ev."

    def worker(self, instance_id: int, nonce: bytes) -> str:
        """The address of a worker."""
        return f"{self._workers}{instance_id:x}.{nonce.hex()}"

    def is_worker(self, text: str) -> bool:
        """Whether the text, from a record, is an address of a worker: nothing else must become a subject."""
        return (
            len(text) <= LONGEST
            and text.startswith(self._workers)
            and _SAFE.fullmatch(text) is not None
            and ".." not in text
            and not text.endswith(".")
        )

    def caller(self, link: str) -> str:
        """Where the caller of a link listens."""
        return self._callers + link

    def link(self, subject: str) -> str | None:
        """The link that a subject ends with; None if it ends with none."""
        link = ".".join(subject.rsplit(".", 2)[-2:])
        return link if _LINK.fullmatch(link) else None

    def events(self, subject: str, source: int | None = None) -> str:
        """The subject of the events of one source, or of all."""
        return f"{self._events}{token(subject)}.{'*' if source is None else f'{source:x}'}"

    def source(self, subject: str) -> int | None:
        """The source that a subject of events ends with; None if it ends with none."""
        last = subject.rpartition(".")[2]
        return int(last, 16) if _SOURCE.fullmatch(last) else None


def token(text: str) -> str:
    """Any text as one word of a subject. Different texts give different words."""
    escaped = "".join(
        chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"={byte:02x}"
        for byte in text.encode("utf-8", "surrogatepass")
    )
    return escaped or "="
