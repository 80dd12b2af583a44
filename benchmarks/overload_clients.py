"""Clients that come whether or not there is room, wait as they are told when there is none, and give up in the end."""

import asyncio
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import msgspec

from benchmarks.http1 import Endpoint
from benchmarks.stats import percentile

ANSWERED, REFUSED, GAVE_UP, FAILED = "answered", "refused", "gave up", "failed"
#: What a server may say when it is busy.
BUSY: Final = (429, 503, 529)
_LONGEST: Final = 60.0
_CONTENT = re.compile(rb'"content":\s*"[^"]')
_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request and what became of it. Times are seconds of `perf_counter`; `first` is that of the first text."""

    began: float
    ended: float
    outcome: str
    first: float | None = None
    retry_after: str | None = None
    #: How often the same client had asked before.
    number: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text of an answer that came whole."""
        return self.first - self.began if self.first is not None and self.outcome == ANSWERED else None


@dataclass(frozen=True, slots=True)
class Client:
    """How every client of a load asks: for one of `bodies`, `attempts` times at most, with `patience` seconds each."""

    endpoint: Endpoint
    bodies: Sequence[bytes]
    patience: float
    attempts: int
    key: str | None = None

    async def ask(self, number: int = 0, which: int = 0) -> Attempt:
        """Ask once, on a connection of its own, for the body with the number `which`."""
        began = perf_counter()
        received = bytearray()
        first: float | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self.patience):
                reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
                writer.write(self._request(self.bodies[which % len(self.bodies)]))
                while data := await reader.read(65536):
                    received += data
                    if first is None and _CONTENT.search(received):
                        first = perf_counter()
        except TimeoutError:
            return Attempt(began, perf_counter(), GAVE_UP, first, number=number)
        except OSError:
            return Attempt(began, perf_counter(), FAILED, first, number=number)
        finally:
            if writer is not None:
                writer.transport.abort()
        ended = perf_counter()
        status = int(received[9:12]) if received[9:12].isdigit() else 0
        if status in BUSY:
            told = _RETRY_AFTER.search(received)
            return Attempt(began, ended, REFUSED, None, told[1].decode() if told else None, number)
        whole = status == 200 and b"data: [DONE]" in received
        return Attempt(began, ended, ANSWERED if whole else FAILED, first, number=number)

    def _request(self, body: bytes) -> bytes:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {self.endpoint.prefix}/v1/chat/completions HTTP/1.1\r\nHost: {self.endpoint.host}\r\n{key}"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def body_of(model: str, prompt: str, tokens: int) -> bytes:
    """Return a streamed chat of exactly so many tokens."""
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )


def pause(attempt: int, told: str | None, chance: float) -> float:
    """Return seconds before the next attempt: what ``Retry-After`` said, or longer each time.

    `chance` is from 0 to 1.
    """
    return min((int(told) if told is not None and told.isdigit() else 2.0**attempt) + chance, _LONGEST)


class Load:
    """Clients that come at random at a constant mean rate, and whatever they have met."""

    def __init__(self, client: Client, rate: float, *, seed: int = 1) -> None:
        """`rate` is in new clients a second."""
        self._client = client
        self._rate = rate
        self._draw = random.Random(seed)
        self.attempts: list[Attempt] = []
        self.came = 0

    async def run(self, seconds: float) -> None:
        """Let clients come for so long; clients that are not done then leave."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        arrival = began
        try:
            async with asyncio.timeout_at(began + seconds), asyncio.TaskGroup() as clients:
                while True:
                    arrival += self._draw.expovariate(self._rate)
                    await asyncio.sleep(max(0.0, arrival - loop.time()))
                    self.came += 1
                    clients.create_task(self._one())
        except TimeoutError:
            return

    async def _one(self) -> None:
        which = self._draw.randrange(len(self._client.bodies))
        for number in range(self._client.attempts):
            met = await self._client.ask(number, which)
            self.attempts.append(met)
            if met.outcome != REFUSED:
                return
            await asyncio.sleep(pause(number, met.retry_after, self._draw.random()))


async def closed_loop(client: Client, clients: int, seconds: float) -> list[Attempt]:
    """Return what so many clients meet that ask again at once, for so long."""
    attempts: list[Attempt] = []
    draw = random.Random(1)

    async def one() -> None:
        while True:
            attempts.append(await client.ask(which=draw.randrange(len(client.bodies))))

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one())
    except TimeoutError:
        pass
    return attempts


def rate(attempts: Iterable[Attempt], begin: float, end: float, outcome: str = ANSWERED) -> float:
    """Return how many a second had this outcome between two times."""
    return sum(begin <= one.ended < end and one.outcome == outcome for one in attempts) / (end - begin)


def ttft(attempts: Iterable[Attempt], share: float, begin: float = 0.0) -> float | None:
    """Return a percentile of the time to the first text, in seconds, of answers to what was asked after a time."""
    values = sorted(one.ttft for one in attempts if one.ttft is not None and one.began >= begin)
    return percentile(values, share) if values else None


def by_second(
    attempts: Iterable[Attempt], begin: float, seconds: int, figure: Callable[[list[Attempt]], float | None]
) -> list[float | None]:
    """Return a figure of what ended in each second."""
    bins: list[list[Attempt]] = [[] for _ in range(seconds)]
    for one in attempts:
        at = int(one.ended - begin)
        if 0 <= at < seconds:
            bins[at].append(one)
    return [figure(content) for content in bins]
