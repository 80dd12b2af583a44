"""The rule for when a failing lease counts as lost."""

from __future__ import annotations

import logging

from dynamo_core.errors import CannotConnect

log = logging.getLogger(__name__)


class Refused(CannotConnect):
    """The store is there and says no: it needs another login or another set of permissions."""


class LeaseFailureTracker:
    """Counts the failed heartbeats of one lease, and says when the lease is lost. Times are of a monotonic clock.

    A store that is away may come back at any time, and frontends go on with the last view: only failures that count
    bring a lease nearer to its end. For one thread at a time.
    """

    def __init__(self, lease: int, lost_after: float) -> None:
        self._lease = lease
        self._lost_after = lost_after
        self._failing = False
        self._since: float | None = None

    def failed(self, error: Exception, now: float, *, counts: bool) -> bool:
        """Record a failure; whether the lease is lost: all failures counted for `lost_after` seconds."""
        if not self._failing:
            log.warning("lease %016x cannot be kept alive: %s", self._lease, error)
        self._failing = True
        if not counts:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > self._lost_after:
            log.error("lease %016x is lost: this has lasted for %.0f s: %s", self._lease, self._lost_after, error)
            return True
        return False

    def succeeded(self) -> None:
        """Record a heartbeat that the store has taken."""
        if self._failing:
            log.info("lease %016x is kept alive again", self._lease)
        self._failing, self._since = False, None
