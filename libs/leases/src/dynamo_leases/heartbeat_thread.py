"""The thread that keeps leases alive while the event loop is busy, for example with an engine that starts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dynamo_leases.lease import HeartbeatLease

log = logging.getLogger(__name__)

#: Seconds until the next heartbeat of a lease whose last one raised an unexpected exception.
RETRY = 1.0


class HeartbeatThread:
    """Sends the heartbeats of leases when they are due. The thread runs from the first lease to `stop`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic, in seconds."""
        self._clock = clock
        self._leases: list[HeartbeatLease] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, lease: HeartbeatLease) -> None:
        """Keep a lease alive until it has ended."""
        with self._changed:
            if self._stopped:
                raise ValueError("discovery is closed")
            self._leases.append(lease)
            if self._thread is None:
                # A daemon: the heartbeat must not hold up a process that is killed or fails.
                self._thread = threading.Thread(target=self._run, name="discovery-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """End the thread and wait up to `timeout` seconds for it. Safe twice, and without `add`."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            now = self._clock()
            with self._changed:
                self._leases = [lease for lease in self._leases if not lease.ended]
                due = [lease for lease in self._leases if lease.due <= now]
                if self._stopped:
                    return
                if not due:
                    earliest = min((lease.due for lease in self._leases), default=None)
                    self._changed.wait(None if earliest is None else earliest - now)
                    continue
            for lease in due:
                try:
                    lease.beat()
                except Exception:
                    # The other leases go on.
                    log.exception("the heartbeat of lease %016x failed", lease.id)
                    lease.due = now + RETRY
