"""Those who wait for one model, and who of them is next. Knows of time what it is told, and of no event loop."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo_plugin_admission_fair_queue.pace import Pace
from dynamo_plugin_admission_fair_queue.shares import Shares

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class Waiter(Generic[ItemT]):
    """One who waits. Times are in seconds of one clock, `cost` in tokens."""

    tenant: str
    priority: int
    cost: float
    arrived: float
    until: float
    item: ItemT
    #: Seconds that it is taken to have arrived earlier, among those of its tenant.
    seniority: float = 0.0
    #: Its place among all who ever came, given by the line, and whether it is in the line now.
    number: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)

    @property
    def order(self) -> tuple[float, int]:
        """Lower goes first within a tenant."""
        return self.arrived - self.seniority, self.number


class Line(Generic[ItemT]):
    """A bounded queue: by priority, which grows with waiting; then fair between tenants; then in order of arrival.

    `running` are all that were let in and are not over, for whoever bounds them.
    """

    def __init__(self, weight: Callable[[str], float], *, size: int, aging: float) -> None:
        self.shares = Shares(weight)
        self.pace = Pace()
        self.running = 0
        self._size = size
        self._aging = aging
        self._count = 0
        self._came = 0
        self._flows: dict[tuple[str, int], list[Waiter[ItemT]]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def __iter__(self) -> Iterator[Waiter[ItemT]]:
        """All who wait, in no order."""
        return (waiter for flow in self._flows.values() for waiter in flow)

    def tenants(self) -> set[str]:
        """Who waits."""
        return {tenant for tenant, _ in self._flows}

    def has_room(self, tenant: str, priority: int) -> bool:
        """Whether a request may wait, perhaps in the place of another."""
        return self._count < self._size or self._victims(tenant, priority) is not None

    def wait_of(self, tenant: str, priority: int, now: float) -> float:
        """Seconds after which a request that comes now may be let in, as far as is known; 0 where it is not."""
        pace = self.pace.per_second(now)
        if pace is None:
            return 0.0
        before = own = 1
        for (other, rank), flow in self._flows.items():
            if rank >= priority:
                before += len(flow)
                own += len(flow) if other == tenant else 0
        return min(before, own / self.shares.part(tenant)) / pace

    def add(self, waiter: Waiter[ItemT]) -> Waiter[ItemT] | None:
        """Lets it wait, which `has_room` has allowed. Returns the one that has to go for it, if the line was full."""
        victim = None
        if self._count >= self._size:
            flow = self._victims(waiter.tenant, waiter.priority)
            if flow is None:
                raise RuntimeError("the line has no room")
            victim = flow[-1]
            self.remove(victim)
        self._came += 1
        waiter.number = self._came
        waiter.waits = True
        self.pace.begin(waiter.arrived)
        insort(self._flows.setdefault((waiter.tenant, waiter.priority), []), waiter, key=lambda one: one.order)
        self._count += 1
        self.shares.enqueue(waiter.tenant)
        return victim

    def remove(self, waiter: Waiter[ItemT]) -> None:
        """It does not wait any more, and was not let in."""
        self._take(waiter)
        self.shares.give_up(waiter.tenant)

    def next(self, now: float, may: Callable[[Waiter[ItemT]], bool]) -> Waiter[ItemT] | None:
        """Who is next of those who `may`; asked of the first of each tenant and priority only."""
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
        """It runs from now on."""
        self.pace.let_in(now)
        self._take(waiter)
        self.shares.begin(waiter.tenant, waiter.cost, waited=True)
        self.running += 1

    def pass_by(self, tenant: str, cost: float) -> None:
        """A request runs from now on that did not have to wait."""
        self.shares.begin(tenant, cost, waited=False)
        self.running += 1

    def end(self, tenant: str, correction: float) -> None:
        """One that ran is over; it has cost so many tokens more than was said."""
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
            self.pace.end()

    def _victims(self, tenant: str, priority: int) -> list[Waiter[ItemT]] | None:
        """Those of whom the last has to go for a newcomer: of the lowest priority, and the tenant with most of them.

        None if nobody has to: all are of a higher priority, or their tenants' queues are no longer than the newcomer's
        would be.
        """
        lowest = min((rank for _, rank in self._flows), default=None)
        if lowest is None or lowest > priority:
            return None
        load, longest = max((self.shares.load(name), name) for name, rank in self._flows if rank == lowest)
        if lowest == priority and (longest == tenant or load <= self.shares.load(tenant, 1)):
            return None
        return self._flows[longest, lowest]
