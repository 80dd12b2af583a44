"""Batched requests to the server that counts for all frontends."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from dynamo_core import TaskSet, pauses
from dynamo_core.errors import CannotConnect

from dynamo_plugin_admission_rate_limit.buckets import Bucket
from dynamo_plugin_admission_rate_limit.meters import Meters
from dynamo_plugin_admission_rate_limit.rules import Rule
from dynamo_plugin_admission_rate_limit.shared_config import SharedConfig

log = logging.getLogger(__name__)

#: The most requests, and the most other buckets, of one exchange. The server does nothing else meanwhile.
_MOST = 256
#: The first pause after a failure, and the longest.
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0
_POLICIES = {
    "local": "each frontend keeps them for itself",
    "allow": "every request is admitted",
    "refuse": "every request that has a limit is refused",
}


@dataclass(frozen=True, slots=True)
class BucketReport:
    """A report on a bucket to the server: the amount spent since the last report, and what is under way here."""

    rule: Rule
    values: tuple[str, ...]
    owed_requests: int
    owed_tokens: int
    running: int


@dataclass(frozen=True, slots=True)
class Question:
    """A request to begin. `buckets` are places in the list of reports."""

    prompt: int
    buckets: Sequence[int]


@dataclass(frozen=True, slots=True)
class BucketAnswer:
    """The bucket, by its place, that refuses a request, and its limit."""

    bucket: int
    limit: str


@dataclass(frozen=True, slots=True)
class Reply:
    """For each question the refusal, None if the request may begin; and for each bucket its levels after all that."""

    refusals: Sequence[BucketAnswer | None]
    levels: Sequence[tuple[float, float]]


class Store(ABC):
    """The store of the buckets. Every method raises `CannotConnect` if the store cannot be asked."""

    @abstractmethod
    async def exchange(self, reports: Sequence[BucketReport], questions: Sequence[Question]) -> Reply:
        """Take in the reports, then decide each question in turn."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the connection; another use makes a new one."""


class Outcome(Enum):
    """The outcome of a request: it is admitted and counted, or the server could not be asked."""

    GRANTED = auto()
    AWAY = auto()


@dataclass(frozen=True, slots=True)
class Shortage:
    """The bucket and the limit that keep a request out."""

    bucket: Bucket
    limit: str


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that waits for the server's answer."""

    buckets: Sequence[Bucket]
    prompt: int
    answer: asyncio.Future[Outcome | Shortage]


class Sharing:
    """The task that asks the server. During one exchange, requests wait for the next, all together.

    A request waits for two exchanges at the most, so for twice `timeout`. After a failure none waits until the server
    has answered again. What was spent in the meantime, and what an exchange without an answer was to tell, is told
    then. Requests under way are told as a number, again and again, so that no lost message changes it for long.
    """

    def __init__(self, config: SharedConfig, store: Store, meters: Meters) -> None:
        self._config = config
        self._store = store
        self._meters = meters
        self._tasks = TaskSet()
        self._wake = asyncio.Event()
        self._exchanged = asyncio.Event()
        self._pending: deque[_Pending] = deque()
        # Buckets that the server is to be told of, in order; and those with requests that it counts.
        self._changed: dict[Bucket, None] = {}
        self._counted: set[Bucket] = set()
        self._due = 0.0
        self._closed = False
        self._failures = 0
        self._pauses: Iterator[float] = pauses(_FIRST_PAUSE, _LAST_PAUSE)
        #: Whether the server answers.
        self.reached = False
        meters.stale(True)

    async def start(self) -> None:
        """Begin, and return after the first exchange, also if it failed."""
        self._tasks.spawn(self._run(), name="share-rate-limits")
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._config.timeout):
                await self._exchanged.wait()

    async def aclose(self) -> None:
        """End, and report that nothing is under way here. Safe twice, and without `start`."""
        reached, self.reached, self._closed = self.reached, False, True
        await self._tasks.aclose()
        if reached:
            self._changed.update(dict.fromkeys(self._counted))
            # If the report is lost, the last one expires.
            with suppress(CannotConnect, TimeoutError):
                async with asyncio.timeout(self._config.timeout):
                    while self._changed:
                        await self._round()
        await self._store.aclose()

    async def ask(self, buckets: Sequence[Bucket], prompt: int) -> Outcome | Shortage:
        """Return whether a request may begin; if so, it counts as under way here."""
        pending = _Pending(buckets, prompt, asyncio.get_running_loop().create_future())
        for bucket in buckets:
            bucket.pinned += 1
        self._pending.append(pending)
        self._wake.set()
        try:
            return await pending.answer
        except asyncio.CancelledError:
            answer = pending.answer
            if answer.done() and not answer.cancelled() and answer.result() is Outcome.GRANTED:
                self._take_back(pending)
                for bucket in buckets:
                    self.ended(bucket)
            raise
        finally:
            for bucket in buckets:
                bucket.pinned -= 1

    def began(self, bucket: Bucket) -> None:
        """Record that a request begins that has this bucket."""
        bucket.running += 1
        if bucket.rule.concurrency is not None:
            self._counted.add(bucket)
        self._note(bucket)

    def ended(self, bucket: Bucket) -> None:
        """Record that a request is over that had this bucket."""
        bucket.running -= 1
        if not bucket.running:
            self._counted.discard(bucket)
        if bucket.rule.concurrency is not None:
            self._changed[bucket] = None
            self._wake.set()
        self._note(bucket)

    def _take_back(self, pending: _Pending) -> None:
        """Take back the admission of a client that left before it heard of it."""
        now = asyncio.get_running_loop().time()
        for bucket in pending.buckets:
            bucket.spend(-1, -pending.prompt, now)
            self._note(bucket)

    def _note(self, bucket: Bucket) -> None:
        """Plan to tell the server what a bucket owes."""
        if bucket.owes:
            self._changed[bucket] = None
            self._wake.set()

    async def _run(self) -> None:
        try:
            # A flag besides, as a library may swallow a cancellation.
            while not self._closed:
                try:
                    async with asyncio.timeout(self._config.timeout):
                        await self._round()
                    self._succeeded()
                except Exception as error:
                    self._failed(error)
                self._meters.stale(not self.reached)
                self._exchanged.set()
                await (self._wait() if self.reached else asyncio.sleep(next(self._pauses)))
        finally:
            self.reached = False
            self._give_up()
            self._exchanged.set()

    async def _wait(self) -> None:
        """Return when there is something to exchange, or the server has to hear again of what runs."""
        now = asyncio.get_running_loop().time()
        if not (self._pending or self._changed) and now < self._due:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._due - now):
                    await self._wake.wait()

    async def _round(self) -> None:
        """Make one exchange."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due or not self.reached:
            self._changed.update(dict.fromkeys(self._counted))
            self._due = loop.time() + self._config.ttl / 3
        waiting = [self._pending.popleft() for _ in range(min(_MOST, len(self._pending)))]
        asked = [pending for pending in waiting if not pending.answer.done()]
        places: dict[Bucket, int] = {}
        for bucket in [*(one for pending in asked for one in pending.buckets), *list(self._changed)[:_MOST]]:
            places.setdefault(bucket, len(places))
            self._changed.pop(bucket, None)
        questions = [Question(pending.prompt, [places[bucket] for bucket in pending.buckets]) for pending in asked]
        reports = [self._report(bucket) for bucket in places]
        answered = False
        try:
            reply = await self._store.exchange(reports, questions)
            answered = True
        finally:
            if not answered:
                self._pending.extendleft(reversed(asked))
                for bucket, report in zip(places, reports, strict=True):
                    bucket.owed_requests += report.owed_requests
                    bucket.owed_tokens += report.owed_tokens
                    self._changed[bucket] = None
        self._apply(asked, list(places), reply)

    def _report(self, bucket: Bucket) -> BucketReport:
        """Return what is to be told of a bucket, which owes nothing any more."""
        running = 0 if self._closed else bucket.running
        report = BucketReport(bucket.rule, bucket.values, bucket.owed_requests, bucket.owed_tokens, running)
        bucket.owed_requests = bucket.owed_tokens = 0
        return report

    def _apply(self, asked: Sequence[_Pending], buckets: Sequence[Bucket], reply: Reply) -> None:
        now = asyncio.get_running_loop().time()
        for bucket, (requests, tokens) in zip(buckets, reply.levels, strict=True):
            bucket.refill(now)
            # What ended during the exchange is not in the answer.
            bucket.set_levels(requests - bucket.owed_requests, tokens - bucket.owed_tokens)
        for pending, refusal in zip(asked, reply.refusals, strict=True):
            if refusal is not None:
                if not pending.answer.done():
                    pending.answer.set_result(Shortage(buckets[refusal.bucket], refusal.limit))
            elif pending.answer.done():
                self._take_back(pending)
            else:
                for bucket in pending.buckets:
                    self.began(bucket)
                pending.answer.set_result(Outcome.GRANTED)

    def _give_up(self) -> None:
        """Leave the requests that wait to what happens without the server."""
        while self._pending:
            answer = self._pending.popleft().answer
            if not answer.done():
                answer.set_result(Outcome.AWAY)

    def _failed(self, error: Exception) -> None:
        self.reached = False
        self._give_up()
        self._failures += 1
        if self._failures > 1 or self._closed:
            return
        policy = _POLICIES[self._config.on_outage]
        if isinstance(error, TimeoutError):
            error = CannotConnect(f"Redis did not answer within {self._config.timeout:g} s")
        unexpected = None if isinstance(error, CannotConnect) else error
        log.warning("rate limits are not shared for now, %s: %s", policy, error, exc_info=unexpected)

    def _succeeded(self) -> None:
        if self._failures:
            log.info("rate limits are shared again")
        self._failures = 0
        self._pauses = pauses(_FIRST_PAUSE, _LAST_PAUSE)
        self.reached = not self._closed
