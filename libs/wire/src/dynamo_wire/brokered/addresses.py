"""Broker addresses of workers, callers and the subscribers of a subject.

==============================  ======================================================================
``P.rq.<instance>.<run>``       a worker, as in its record: instance id and run, in hex
``P.cl.<caller>``               a caller: its run in hex
``P.pb.<instance>.<run>``       a thread of a worker's process, which answers probes
``P.ev.<subject>``              the subscribers of a subject
==============================  ======================================================================

`P` is the prefix of the settings; brokers differ in what stands for the dots. A *link* is named ``<caller>.<number>``:
a caller's run, and a count of the links that it has made.
"""

from __future__ import annotations

import re

#: Bytes of the number that tells one run of a process from every other.
RUN_BYTES = 12

#: The longest address that is taken from elsewhere.
MAX_ADDRESS = 512

_LINK = re.compile(rf"[0-9a-f]{{{2 * RUN_BYTES}}}\.[0-9]{{1,18}}")
_PLAIN = re.compile(rb"[A-Za-z0-9_-]")


class Addresses:
    """Makes the addresses under one prefix. Prefixes are words of letters, digits, - and _, separated."""

    def __init__(self, prefix: str, separator: str) -> None:
        self._workers = separator.join((prefix, "rq", ""))
        self._callers = separator.join((prefix, "cl", ""))
        self._probes = separator.join((prefix, "pb", ""))
        self._events = separator.join((prefix, "ev", ""))
        self._separator = separator
        self._worker = re.compile(
            rf"{re.escape(self._workers)}[0-9a-f]{{1,16}}{re.escape(separator)}[0-9a-f]{{{2 * RUN_BYTES}}}"
        )

    def worker(self, instance_id: int, run: bytes) -> str:
        """Return where a worker listens."""
        return f"{self._workers}{instance_id:x}{self._separator}{run.hex()}"

    def is_worker(self, text: str) -> bool:
        """Return whether the text, from elsewhere, is the address of a worker: nothing else must be sent to."""
        return len(text) <= MAX_ADDRESS and self._worker.fullmatch(text) is not None

    def probes(self, worker: str) -> str:
        """Return where the process of the worker at an address answers probes."""
        return self._probes + worker.removeprefix(self._workers)

    def caller(self, link: str) -> str:
        """Return where the caller of a link listens."""
        return self._callers + link.partition(".")[0]

    def events(self, subject: str) -> str:
        """Return where the events of a subject are listened to."""
        return self._events + word(subject)


def is_link(text: str) -> bool:
    """Return whether the text, from elsewhere, is the name of a link."""
    return _LINK.fullmatch(text) is not None


def word(text: str) -> str:
    """Return any text as one word of an address. Different texts give different words."""
    escaped = "".join(
        chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"={byte:02x}"
        for byte in text.encode("utf-8", "surrogatepass")
    )
    return escaped or "="
