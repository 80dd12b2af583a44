"""Names of workers, which requests know by id only, and which outlive the workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from dynamo_core import ObservedPool
from dynamo_core.protocol import Instance

#: Names that are kept. A worker that is restarted has another id.
KEPT: Final = 10_000


def name_of(instance: Instance) -> str:
    """Return what operators call a worker: its name in the config, and its replica."""
    return f"{instance.worker}-{instance.replica}"


class WorkerNames:
    """The names of workers that had requests. `pools` has the current ones."""

    def __init__(self, pools: Callable[[], Iterable[ObservedPool]]) -> None:
        self._pools = pools
        self._names: OrderedDict[int, str] = OrderedDict()

    def note(self, instance_id: int) -> None:
        """Note that a request goes to this worker, which therefore exists."""
        if instance_id in self._names:
            return
        found = (pool.instances.get(instance_id) for pool in self._pools())
        instance = next((one for one in found if one is not None), None)
        if instance is not None:
            self._names[instance_id] = name_of(instance)
            if len(self._names) > KEPT:
                self._names.popitem(last=False)

    def get(self, instance_id: int | None) -> str | None:
        """Return the name of a worker, if it is known."""
        return None if instance_id is None else self._names.get(instance_id)
