"""The bound on everything held, and the share that one tenant may take."""

from __future__ import annotations

from dynamo_plugin_router_slot_tracker.errors import Full

#: Most hashes of all active requests together. Each takes about 180 bytes of memory.
MAX_HELD = 2_097_152
#: Hashes that a request counts as beside its own, and characters of its id that count as one more.
REQUEST, ID = 4, 128


class HeldCapacity:
    """Counts the hashes that tenants hold, and leaves each as much as is free.

    One tenant alone may therefore take half, two a third each, and there is always room for one more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._tenants: dict[str, int] = {}

    def take(self, tenant: str, request_id: str, hashes: int) -> int:
        """Count a request with so many hashes in. Return its weight, which `give_back` takes.

        Raises:
            Full: the tenant would hold more than is left.
        """
        weight = hashes + REQUEST + len(request_id) // ID
        held, free = self._tenants.get(tenant, 0), self._most - self._taken
        if held + weight > free:
            raise Full(
                f"tenant_id={tenant} holds {held} hashes, and {free} of {self._most} are free: a tenant may hold as "
                "many as are free (--max-held)"
            )
        self._taken += weight
        self._tenants[tenant] = held + weight
        return weight

    def give_back(self, tenant: str, weight: int) -> None:
        """Count out what a request has taken."""
        self._taken -= weight
        left = self._tenants[tenant] - weight
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]
