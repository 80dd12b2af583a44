"""How many KV blocks are in use: reports that are late, what was placed since, and what other frontends tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
from dynamo_core.contracts.router import Route
from dynamo_core.protocol.events import PlacedLoad, PlacedLoads
from dynamo_core.protocol.records import Instance
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadMessages
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_runtime.dispatch.load.used_blocks import SETTLE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

RANK = (7, 0)
BLOCK = 4
#: Seconds that a request takes to the engine, and a report to a frontend; and what one frontend tells to the other.
WAY = 0.05
TELLING = 0.1


def place(tracker: LoadTracker, blocks: int, name: str = "r", hashes: range | tuple[int, ...] = ()) -> Reservation:
    tokens = BLOCK * blocks
    route = Route(Instance(instance_id=RANK[0]), RANK[1])
    return tracker.reserve(route, name, prompt_tokens=tokens, block_size=BLOCK, hashes=hashes, held_tokens=tokens)


def used(tracker: LoadTracker) -> int:
    return tracker.used_blocks(*RANK, BLOCK)


def quiet(blocks: int, now: float = 0.0) -> LoadTracker:
    """Return a tracker whose worker has reported the same for a while."""
    tracker = LoadTracker()
    for earlier in (4, 2, 0):
        tracker.reported(RANK, blocks, now - earlier)
    return tracker


def test_a_placement_adds_to_the_last_report_at_once() -> None:
    tracker = quiet(30)

    reservation = place(tracker, 25)
    placed = used(tracker)
    reservation.release()

    assert (placed, used(tracker)) == (55, 30)


def test_a_placement_in_the_report_is_not_counted_twice() -> None:
    tracker = quiet(30)
    place(tracker, 25)

    tracker.reported(RANK, 55, 0.01)

    assert used(tracker) == 55


def test_a_report_that_was_made_before_a_request_arrived_takes_nothing_away() -> None:
    tracker = quiet(30)
    place(tracker, 25, "r")
    place(tracker, 25, "s")

    # Only the first one has arrived.
    tracker.reported(RANK, 55, 0.01)

    assert used(tracker) == 80


def test_the_report_overrides_settled_placements() -> None:
    tracker = quiet(30)
    reservation = place(tracker, 25)
    reservation.first_item()

    # It shares ten blocks with another request, which only the worker can know.
    for late in (0.01, SETTLE + 0.02):
        tracker.reported(RANK, 45, late)

    assert used(tracker) == 45


def test_prompts_that_wait_in_the_engine_count_however_long() -> None:
    tracker = quiet(0)
    reservations = [place(tracker, 25, name) for name in "ab"]

    for second in range(1, 5):
        tracker.reported(RANK, 25, second)
    waiting = used(tracker)
    for reservation in reservations:
        reservation.first_item()

    assert (waiting, used(tracker)) == (50, 25)


def test_a_request_that_ends_frees_nothing_of_the_last_report_until_the_next() -> None:
    tracker = quiet(0)
    reservation = place(tracker, 25)
    for late in (0.1, 1.0):
        tracker.reported(RANK, 40, late)

    reservation.release()
    ended = used(tracker)
    tracker.reported(RANK, 0, 1.1)

    assert (ended, used(tracker)) == (40, 0)


def test_blocks_that_requests_share_count_once() -> None:
    tracker = quiet(0)
    place(tracker, 26, "r", hashes=range(25))

    # One block each is not full, and has no hash.
    place(tracker, 26, "s", hashes=range(25))

    assert used(tracker) == 27


def test_placements_count_alone_before_the_first_report() -> None:
    tracker = LoadTracker()
    place(tracker, 25)
    alone = used(tracker)
    tracker.reported(RANK, 0, 0.0)

    assert (alone, used(tracker)) == (25, 25)


def test_placements_count_alone_after_reports_are_forgotten() -> None:
    tracker = quiet(60)
    place(tracker, 25)

    tracker.forget_reports(RANK)

    assert used(tracker) == 25


def tell(tracker: LoadTracker, number: int, blocks: int, now: float) -> None:
    load = PlacedLoad(*RANK, 1 if blocks else 0, 0, 0, blocks)
    tracker.peers.apply(PlacedLoads(1, number, False, [load]), now)


def test_peer_placements_count_once_in_any_order() -> None:
    first, second = quiet(0), quiet(0)

    tell(first, 1, 25, 0.20)
    early = used(first)
    for tracker in (first, second):
        tracker.reported(RANK, 25, 0.21)
    tell(second, 1, 25, 0.25)
    found = [used(first), used(second)]
    for tracker in (first, second):
        tracker.reported(RANK, 25, 3.0)

    assert (early, found, [used(first), used(second)]) == (25, [25, 25], [25, 25])


def test_peer_placements_count_until_they_end() -> None:
    tracker = quiet(10)
    tell(tracker, 1, 25, 1.0)
    busy = used(tracker)

    tell(tracker, 2, 0, 2.0)

    assert (busy, used(tracker)) == (35, 10)


def test_messages_of_the_previous_format_are_applied() -> None:
    tracker = quiet(10)
    message = msgspec.msgpack.encode([1, 1, True, [[*RANK, 1, 100, 25]]])

    PeerLoadMessages(tracker).apply(message, 1.0)

    assert used(tracker) == 35


@dataclass
class Running:
    """One request, and where it has got to."""

    reservation: Reservation
    frontend: int
    blocks: int
    placed: float
    #: Blocks that the worker holds for it; None before it has arrived.
    held: int | None = None


@dataclass
class Frontend:
    """A tracker, and what is on its way to it."""

    tracker: LoadTracker = field(default_factory=LoadTracker)
    reports: list[tuple[float, int]] = field(default_factory=list)
    #: When it was told, the message, and which requests it is about.
    messages: list[tuple[float, bytes, list[Running]]] = field(default_factory=list)
    #: Since when something has not been told.
    untold: float = math.inf
    #: The other's requests that it knows of.
    known: list[Running] = field(default_factory=list)
    #: When reports were heard that count.
    heard: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.composer = PeerLoadMessages(self.tracker)
        self.tracker.on_change = self.composer.note


class World(RuleBasedStateMachine):
    """Two frontends and a worker; everything takes its time, within bounds, and reports may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.frontends = [Frontend(), Frontend()]
        self.running: list[Running] = []
        #: All that there ever were.
        self.requests: list[Running] = []
        #: Requests that have ended for their frontend and not yet for the worker.
        self.lingering: list[tuple[float, Running]] = []
        #: When answers have grown, by how much.
        self.grown: list[tuple[float, int]] = []
        self.names = 0

    which = st.integers(0, 1)

    @initialize(frontend=which, blocks=st.integers(1, 9), answer=st.integers(0, 60))
    def a_long_answer_is_under_way(self, frontend: int, blocks: int, answer: int) -> None:
        self.request(frontend, blocks)
        self.arrive(0)
        self.answer(0, answer)
        self.all_is_quiet()

    @property
    def held(self) -> int:
        alive = [*self.running, *(request for _, request in self.lingering)]
        return sum(request.held or 0 for request in alive)

    def pick(self, at: int) -> Running | None:
        return self.running[at % len(self.running)] if self.running else None

    @rule(which=which, blocks=st.integers(1, 30))
    def request(self, which: int, blocks: int) -> None:
        self.names += 1
        frontend = self.frontends[which]
        reservation = place(frontend.tracker, blocks, f"r{self.names}")
        self.requests.append(Running(reservation, which, blocks, self.now))
        self.running.append(self.requests[-1])
        frontend.untold = min(frontend.untold, self.now)

    @rule(at=st.integers(0, 9))
    def arrive(self, at: int) -> None:
        request = self.pick(at)
        if request is not None and request.held is None:
            request.held = request.blocks

    @rule(at=st.integers(0, 9), more=st.integers(1, 9))
    def answer(self, at: int, more: int) -> None:
        request = self.pick(at)
        if request is not None and request.held is not None:
            request.reservation.first_item()
            request.held += more
            self.grown.append((self.now, more))

    @rule(at=st.integers(0, 9), cancelled=st.booleans())
    def release(self, at: int, cancelled: bool) -> None:
        """Release a request: complete, cancelled, or refused before it arrived."""
        request = self.pick(at)
        if request is None:
            return
        self.running.remove(request)
        request.reservation.release()
        frontend = self.frontends[request.frontend]
        frontend.untold = min(frontend.untold, self.now)
        if cancelled and request.held is not None:
            self.lingering.append((self.now, request))

    @rule(lost=st.sets(which))
    def report(self, lost: set[int]) -> None:
        for number, frontend in enumerate(self.frontends):
            if number not in lost:
                frontend.reports.append((self.now, self.held))

    @rule(which=which)
    def hear(self, which: int) -> None:
        frontend = self.frontends[which]
        if frontend.reports:
            _, blocks = frontend.reports.pop(0)
            frontend.tracker.reported(RANK, blocks, self.now)
            frontend.heard.append(self.now)

    @rule(which=which)
    def tell(self, which: int) -> None:
        frontend = self.frontends[which]
        own = [request for request in self.running if request.frontend == which]
        since = min(frontend.untold, self.now)
        self.frontends[1 - which].messages.append((since, frontend.composer.changes(), own))
        frontend.untold = math.inf

    @rule(which=which)
    def be_told(self, which: int) -> None:
        frontend = self.frontends[which]
        if frontend.messages:
            _, message, frontend.known = frontend.messages.pop(0)
            frontend.composer.apply(message, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.04, 0.1, 0.3, 2.0]))
    def time_passes(self, seconds: float) -> None:
        """Advance the time in steps, so that what is due happens on the way."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.01)
            self.catch_up()

    def catch_up(self) -> None:
        soon = self.now + 0.01
        for request in self.running:
            if request.held is None and soon - request.placed >= WAY:
                request.held = request.blocks
        self.lingering = [(since, request) for since, request in self.lingering if soon - since < WAY]
        for number, frontend in enumerate(self.frontends):
            while frontend.reports and soon - frontend.reports[0][0] >= WAY:
                self.hear(number)
            if soon - frontend.untold >= TELLING / 2:
                self.tell(number)
            while frontend.messages and soon - frontend.messages[0][0] >= TELLING:
                self.be_told(number)

    @invariant()
    def everything_that_a_frontend_can_know_of_is_counted(self) -> None:
        """Assert the counts but for recent growth of answers and for what crossed a report that still counts.

        What the other one placed lately may stand for what it had there before: it tells sums.
        """
        for number, frontend in enumerate(self.frontends):
            settled = [heard for heard in frontend.heard if heard <= frontend.heard[-1] - SETTLE]
            counting = frontend.heard[max(0, len(settled) - 1) :]
            alive = [one for one in self.running if one.frontend == number]
            alive += [one for one in frontend.known if one in self.running and one.placed < counting[0] - TELLING]
            crossed = min(sum(one.blocks for one in self.requests if self.crosses(one, number, at)) for at in counting)
            grown = sum(more for when, more in self.grown if when > counting[0] - WAY)
            whole = sum(one.blocks if one.held is None else one.held for one in alive)
            assert used(frontend.tracker) >= whole - grown - crossed

    @staticmethod
    def crosses(request: Running, frontend: int, heard: float) -> bool:
        """Return whether a report that was heard then may lack a request that the frontend takes it to have."""
        late = TELLING if request.frontend != frontend else 0.0
        return -2 * WAY < request.placed - heard <= late

    @precondition(lambda self: self.running)
    @rule()
    def all_is_quiet(self) -> None:
        """Assert that after two reports both frontends count what the worker does."""
        for _ in range(2):
            self.time_passes(SETTLE + 0.1)
            self.report(set())
        self.time_passes(WAY)
        self.report(set())
        self.time_passes(WAY)
        for request in self.running:
            request.reservation.first_item()
        assert [used(frontend.tracker) for frontend in self.frontends] == [self.held] * 2

    def teardown(self) -> None:
        """Assert that one report is enough at the end: nothing keeps an idle worker busy."""
        while self.running:
            self.release(0, cancelled=True)
        self.time_passes(2 * TELLING)
        self.report(set())
        self.time_passes(WAY)
        assert [used(frontend.tracker) for frontend in self.frontends] == [0, 0]


TestWorld = World.TestCase
TestWorld.settings = settings(stateful_step_count=40, deadline=None)
