"""Hook listeners for ended requests. Light, since it is imported where no router runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import ref

if TYPE_CHECKING:
    from dynamo_core.protocol import RequestRecord


class Listener(Protocol):
    """A hook listener for ended requests."""

    def finished(self, record: RequestRecord) -> None:
        """Record an ended request; any router may have chosen its worker."""


#: Called once for each request: a list of weak references is the cheapest that does not keep them alive.
_listeners: list[ref[Listener]] = []


def register(listener: Listener) -> None:
    """Notify it from now on, for as long as it lives."""
    _listeners.append(ref(listener, _listeners.remove))


def unregister(listener: Listener) -> None:
    """Stop notifying it. Safe twice."""
    _listeners[:] = [one for one in _listeners if one() is not listener]


def finished(record: RequestRecord) -> None:
    """Tell all."""
    for one in tuple(_listeners):
        listener = one()
        if listener is not None:
            listener.finished(record)
