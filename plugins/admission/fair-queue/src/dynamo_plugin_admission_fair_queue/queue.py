"""The requests that wait for one model, and which of them is next. Callers pass the time; no event loop is involved."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo_plugin_admission_fair_queue.admission_rate import Throughput
from dynamo_plugin_admission_fair_queue.shares import Shares

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class Waiter(Generic[ItemT]):
    """A request that waits. Times are in seconds of one clock, `cost` in tokens."""

    tenant: str
    priority: int
    cost: float
    arrived: float
    until: float
    item: ItemT
    #: Seconds that it is taken to have arrived earlier, among those of its tenant.
    seniority: float = 0.0
    #: Its place among all requests that ever came, given by the queue, and whether it is in the queue now.
    number: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)

    @property
    def order(self) -> tuple[float, int]:
        """Lower goes first within a tenant."""
        return self.arrived - self.seniority, self.number


class RequestQueue(Generic[ItemT]):
    """A bounded queue: by priority, which grows with waiting; then fair between tenants; then in order of arrival.

    `running` counts the requests that were admitted and have not ended.
    """

    def __init__(self, weight: Callable[[str], float], *, size: int, aging: float) -> None:
        self.shares = Shares(weight)
        self.throughput = Throughput()
        self.running = 0
        self._size = size
        self._aging = aging
        self._count = 0
        self._came = 0
        self._flows: dict[tuple[str, int], list[Waiter[ItemT]]] = {}

    def __len__(self) -> int:
        """Return how many wait."""
        return self._count

    def __iter__(self) -> Iterator[Waiter[ItemT]]:
        """Return all requests that wait, in no order."""
        return (waiter for flow in self._flows.values() for waiter in flow)

    def resize(self, size: int, aging: float) -> None:
        """Hold so many from now on. Those that wait beyond that keep their places."""
        self._size = size
        self._aging = aging

    def tenants(self) -> set[str]:
        """Return the tenants with requests that wait."""
        return {tenant for tenant, _ in self._flows}

    def has_room(self, tenant: str, priority: int) -> bool:
        """Return whether a request may wait, perhaps in the place of another."""
        return self._count < self._size or self._victims(tenant, priority) is not None

    def wait_of(self, tenant: str, priority: int, now: float) -> float:
        """Return the expected wait in seconds of a request that comes now; 0 while there is no estimate."""
        rate = self.throughput.per_second(now)
        if rate is None:
            return 0.0
        before = own = 1
        for (other, rank), flow in self._flows.items():
            if rank >= priority:
                before += len(flow)
                own += len(flow) if other == tenant else 0
        return min(before, own / self.shares.part(tenant)) / rate

    def add(self, waiter: Waiter[ItemT]) -> Waiter[ItemT] | None:
        """Add a request, which `has_room` has allowed. Return the one that loses its place to it, if any."""
        victim = None
        if self._count >= self._size:
            flow = self._victims(waiter.tenant, waiter.priority)
            if flow is None:
                raise RuntimeError("the queue has no room")
            victim = flow[-1]
            self.remove(victim)
        self._came += 1
        waiter.number = self._came
        waiter.waits = True
        self.throughput.begin(waiter.arrived)
        insort(self._flows.setdefault((waiter.tenant, waiter.priority), []), waiter, key=lambda one: one.order)
        self._count += 1
        self.shares.enqueue(waiter.tenant)
        return victim

    def remove(self, waiter: Waiter[ItemT]) -> None:
        """Remove a request that was not admitted."""
        self._take(waiter)
        self.shares.give_up(waiter.tenant)

    def next(self, now: float, may: Callable[[Waiter[ItemT]], bool]) -> Waiter[ItemT] | None:
        """Return the next request of those that `may` run; ask only for the first of each tenant and priority."""
        best, best_key = None, None
        for flow in self._flows.values():
            head = flow[0]
            if not may(head):
                continue
            priority = head.priority + int((now - head.arrived) / self._aging)
            key = (-priority, self.shares.tag(head.tenant), head.order)
            if best_key is None or key < best_key:
                best, best_key = head, key
        return best

    def let_in(self, waiter: Waiter[ItemT], now: float) -> None:
        """Admit a request that waited: it runs from now on."""
        self.throughput.let_in(now)
        self._take(waiter)
        self.shares.begin(waiter.tenant, waiter.cost, waited=True)
        self.running += 1

    def pass_by(self, tenant: str, cost: float) -> None:
        """Admit a request that did not have to wait."""
        self.shares.begin(tenant, cost, waited=False)
        self.running += 1

    def end(self, tenant: str, correction: float) -> None:
        """End a request that has cost so many tokens more than expected."""
        self.running -= 1
        self.shares.end(tenant, correction)

    def _take(self, waiter: Waiter[ItemT]) -> None:
        key = (waiter.tenant, waiter.priority)
        flow = self._flows[key]
        flow.remove(waiter)
        if not flow:
            del self._flows[key]
        waiter.waits = False
        self._count -= 1
        if not self._count:
            self.throughput.end()

    def _victims(self, tenant: str, priority: int) -> list[Waiter[ItemT]] | None:
        """Return the flow whose last request yields to a new one: lowest priority, then the tenant with most.

        None if there is none: all are of a higher priority, or no tenant has more waiting requests than the new one's
        would have.
        """
        lowest = min((rank for _, rank in self._flows), default=None)
        if lowest is None or lowest > priority:
            return None
        load, longest = max((self.shares.load(name), name) for name, rank in self._flows if rank == lowest)
        if lowest == priority and (longest == tenant or load <= self.shares.load(tenant, 1)):
            return None
        return self._flows[longest, lowest]
