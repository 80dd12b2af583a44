"""The answers of /health and /ready for this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dynamo_core.protocol.records import Instance

from dynamo_runtime.dispatch.models.model import Model
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.settings import Settings


class Health:
    """See `dynamo_http.health.HealthSource`."""

    def __init__(
        self,
        settings: Settings,
        models: Models,
        waits_for: Callable[[], str] = str,
        failures: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`waits_for` is what the process has yet to connect with, empty once it has; see `Plane.waits_for`.

        `failures` is what is wrong with extensions; see `Extensions.failures`.
        """
        self._models = models
        self._failures = failures
        self._waits_for = waits_for
        self._minimum = settings.client.min_initial_workers
        self._required = sorted({worker.model.name for worker in settings.workers.values()})
        self.shutting_down = False

    def instances(self) -> Sequence[Instance]:
        """Return the workers that can be routed to."""
        return self._models.instances()

    def failures(self) -> Mapping[str, str]:
        """Return what is wrong with extensions, by name."""
        return self._failures()

    def readiness(self) -> tuple[bool, str]:
        """Return ready once all is connected, the snapshot is in, and the models have enough workers of every role.

        These are the models of the config, or else any one model.
        """
        if self.shutting_down:
            return False, "shutting down"
        if reason := self._waits_for():
            return False, reason
        if not self._models.synced:
            return False, "the first snapshot of discovery is not in yet"
        models = {model.name: model for model in self._models.list()}
        if not self._minimum:
            return True, "ready"
        lacks = [self._lack(name, models.get(name)) for name in self._required or models]
        if self._required:
            reason = next(filter(None, lacks), "")
        else:
            reason = "" if "" in lacks else next(iter(lacks), "no worker has registered yet")
        return not reason, reason or "ready"

    def _lack(self, name: str, model: Model | None) -> str:
        """Return what a model still needs; empty if nothing."""
        count = 0 if model is None else model.instance_count
        if model is None or count < self._minimum:
            return f"model {name} has {count} of {self._minimum} workers"
        return f"model {name} has no {' and no '.join(model.missing_roles)} worker" if model.missing_roles else ""
