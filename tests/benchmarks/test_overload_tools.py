"""The clients of the overload benchmark see what servers tell them; figures, table and picture are made of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.http1 import Endpoint
from benchmarks.overload import Cost, Fairness, Outcome, misses
from benchmarks.overload_clients import (
    ANSWERED,
    FAILED,
    REFUSED,
    Attempt,
    Client,
    body_of,
    by_second,
    pause,
    rate,
    ttft,
)

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b"data: [DONE]\n\n"
)
REFUSAL = b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
GOOD = Outcome(0.2, 10.0, 0.1, 0.3, 20.0, 0.0, 0, 0.5, {}, [9.0, 11.0], [0.3, None])
FAIR, CHEAP = Fairness(0.2, 0.22, 50, 0), {"fair-queue": Cost(0.1, 0.01)}


@asynccontextmanager
async def serving(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[Endpoint]:
    """A server that answers as it is told, or never."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = answer(await reader.readuntil(b"\r\n\r\n"))
            if said is not None:
                writer.write(said)
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "")


def client(endpoint: Endpoint, *, patience: float = 10.0, attempts: int = 1, key: str | None = None) -> Client:
    return Client(endpoint, [body_of("m", "p", 2)], patience, attempts, key)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (STREAM, ANSWERED),
        (REFUSAL, REFUSED),
        (STREAM.replace(b"data: [DONE]\n\n", b""), FAILED),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", FAILED),
        (b"", FAILED),
    ],
)
async def test_a_client_tells_a_whole_answer_from_a_refusal_and_from_a_failure(answer: bytes, outcome: str) -> None:
    async with serving(lambda _: answer) as endpoint:
        met = await client(endpoint).ask()

    assert met.outcome == outcome
    assert (met.ttft is not None) == (outcome == ANSWERED)
    assert met.retry_after == ("7" if outcome == REFUSED else None)


@pytest.mark.parametrize(("told", "seconds"), [("7", 7.5), (None, 4.5), ("soon", 4.5), ("1000", 60.0)])
def test_a_pause_is_what_the_server_says_or_grows(told: str | None, seconds: float) -> None:
    assert pause(2, told, 0.5) == seconds


def test_figures_are_of_the_time_that_counts() -> None:
    met = [Attempt(at, at + 0.5, ANSWERED, at + at / 10) for at in (1.0, 2.0, 3.0)] + [Attempt(3.0, 3.1, REFUSED)]

    assert rate(met, 2.0, 4.0) == 1.0
    assert rate(met, 2.0, 4.0, REFUSED) == 0.5
    assert ttft(met, 0.5, 2.0) == pytest.approx(0.25)
    assert ttft([], 0.5) is None
    assert by_second(met, 1.0, 3, lambda some: float(len(some))) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"goodput": 8.9}, "goodput"),
        ({"p99": 0.41}, "p99 TTFT"),
        ({"probe": None}, "fresh client"),
        ({"left": {"x": 1.0}}, "left in accounts"),
        ({"failed": 1}, "1 requests failed"),
    ],
)
def test_what_is_promised_and_was_not_found_is_told(bad: dict[str, object], said: str) -> None:
    outcomes = {"fair-queue": replace(GOOD, **bad)}  # type: ignore[arg-type]

    assert misses({"fair-queue": GOOD, "none": replace(GOOD, goodput=1.0)}, 10.0, FAIR, CHEAP) == []
    assert [said in line for line in misses(outcomes, 10.0, FAIR, CHEAP)] == [True]
