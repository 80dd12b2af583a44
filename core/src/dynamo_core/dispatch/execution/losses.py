"""What the log says of workers that are lost: one warning per worker and reason, however many requests lose it."""

from __future__ import annotations

import logging
import time

from dynamo_core.errors import DynamoError

log = logging.getLogger(__name__)

#: Seconds for which a worker is not warned of again for the same reason.
QUIET = 60.0
#: The most pairs of worker and reason that are remembered.
MOST = 1024


class LossLog:
    """Warns of workers that requests were lost on."""

    __slots__ = ("_quiet_until",)

    def __init__(self) -> None:
        self._quiet_until: dict[tuple[int | None, str], float] = {}

    def lost(self, instance_id: int | None, error: DynamoError) -> None:
        """A request has lost a worker; None: no worker was chosen yet."""
        now = time.monotonic()
        key = (instance_id, error.kind)
        if self._quiet_until.get(key, 0.0) > now:
            return
        if len(self._quiet_until) >= MOST:
            self._quiet_until = {known: until for known, until in self._quiet_until.items() if until > now}
            if len(self._quiet_until) >= MOST:
                self._quiet_until.clear()
        self._quiet_until[key] = now + QUIET
        where = "a worker that is not known" if instance_id is None else f"worker {instance_id:016x}"
        log.warning("requests lose %s: %s: %s", where, error.kind, error)
