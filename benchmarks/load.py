"""The closed loop: drives one scenario against one target, checks every answer, and measures."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

import msgspec

from benchmarks.children import ChildFailed
from benchmarks.http1 import BadResponse, Connection, Endpoint, Reply
from benchmarks.meters import Meter
from benchmarks.scenarios import Scenario
from benchmarks.stats import percentile

PROMPT: Final = "Tell me in a few plain words how a river finds its way from the hills to the sea, and why it bends."
WARM_UP_SECONDS: Final = 0.3
WARM_UP_TOKENS: Final = 16


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_completion = msgspec.json.Decoder(_Completion)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test. `stream_usage` asks streams for their usage, so that the tokens of each are counted.

    `tools` are those of each request.
    """

    name: str
    endpoint: Endpoint
    model: str
    meter: Meter
    request_timeout: float = 60.0
    stream_usage: bool = True
    tools: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one scenario. Times in ms, CPU in seconds, memory in MiB; None = not known or not measured."""

    requests: int
    tokens: int
    seconds: float
    errors: int
    error_kinds: dict[str, int]
    requests_per_second: float
    tokens_per_second: float
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    ttfb_p50_ms: float | None
    ttfb_p99_ms: float | None
    cpu_per_1k_requests: float | None
    cpu_per_100k_tokens: float | None
    server_busy: float | None
    peak_rss_mib: float | None
    events_per_stream: float | None
    client_busy: float


class _Tally:
    """What the clients of one run saw."""

    def __init__(self) -> None:
        self.tokens = 0
        self.latency: list[float] = []
        self.ttfb: list[float] = []
        self.events = 0
        self.errors: Counter[str] = Counter()

    def take(self, reply: Reply, scenario: Scenario, *, usage_asked: bool) -> None:
        fault = _fault(reply, scenario, usage_asked=usage_asked)
        if fault is not None:
            self.errors[fault] += 1
            return
        self.tokens += scenario.max_tokens
        self.latency.append(reply.ended - reply.sent)
        first = reply.first_byte
        if reply.stream is not None:
            self.events += reply.stream.events
            first = reply.stream.first_content or reply.ended
        self.ttfb.append(first - reply.sent)


def request_body(target: Target, scenario: Scenario) -> bytes:
    """Return the JSON body every request of the scenario has."""
    body: dict[str, object] = {
        "model": target.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": scenario.max_tokens,
        "stream": scenario.stream,
    }
    if target.tools:
        body["tools"] = target.tools
    if scenario.stream and target.stream_usage:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


async def measure(target: Target, scenario: Scenario) -> Measured:
    """Warm up, then run the scenario once and say what it cost.

    A failed or wrong answer is counted, never raised. Raise ProcessLookupError when the process under test is gone.
    """
    warm = replace(scenario, seconds=WARM_UP_SECONDS, max_tokens=min(scenario.max_tokens, WARM_UP_TOKENS))
    connections: list[Connection | None] = [None] * scenario.clients
    try:
        warm_tally = await _drive(target, warm, connections)
        before = await target.meter.read()
        own_before = time.process_time()
        start = perf_counter()
        tally = await _drive(target, scenario, connections)
        seconds = perf_counter() - start
        own = time.process_time() - own_before
        after = await target.meter.read()
    finally:
        for connection in connections:
            if connection is not None:
                connection.close()

    answered = len(tally.latency)
    tally.errors.update(warm_tally.errors)
    latency, ttfb = sorted(tally.latency), sorted(tally.ttfb)
    cpu: float | None = None
    if before.cpu_seconds is not None and after.cpu_seconds is not None:
        cpu = after.cpu_seconds - before.cpu_seconds
    return Measured(
        requests=answered,
        tokens=tally.tokens,
        seconds=seconds,
        errors=tally.errors.total(),
        error_kinds=dict(tally.errors),
        requests_per_second=answered / seconds,
        tokens_per_second=tally.tokens / seconds,
        latency_p50_ms=_ms(latency, 0.5),
        latency_p99_ms=_ms(latency, 0.99),
        ttfb_p50_ms=_ms(ttfb, 0.5),
        ttfb_p99_ms=_ms(ttfb, 0.99),
        cpu_per_1k_requests=cpu / answered * 1_000 if cpu is not None and answered else None,
        cpu_per_100k_tokens=cpu / tally.tokens * 100_000 if cpu is not None and tally.tokens else None,
        server_busy=cpu / seconds if cpu is not None else None,
        peak_rss_mib=after.peak_rss_mib,
        events_per_stream=tally.events / answered if scenario.stream and answered else None,
        client_busy=own / seconds,
    )


async def _drive(target: Target, scenario: Scenario, connections: list[Connection | None]) -> _Tally:
    """Run the closed loop over `connections`, one for each client, opening those that are not open."""
    tally = _Tally()
    request = target.endpoint.post("/v1/chat/completions", request_body(target, scenario))
    left = scenario.requests
    no_later_than = perf_counter() + scenario.seconds

    async def client(number: int) -> None:
        nonlocal left
        while left > 0 and perf_counter() < no_later_than:
            left -= 1
            try:
                connection = connections[number]
                if connection is None or not connection.usable:
                    connection = connections[number] = await Connection.open(target.endpoint)
                reply = await connection.exchange(request, stream=scenario.stream, timeout=target.request_timeout)
            except TimeoutError:
                tally.errors[f"no complete answer within {target.request_timeout:g} s"] += 1
            except (OSError, BadResponse) as error:
                tally.errors[f"{type(error).__name__}: {error}"] += 1
                # A refused connection fails at once: without this pause the loop would only count refusals.
                await asyncio.sleep(0.05)
            else:
                tally.take(reply, scenario, usage_asked=target.stream_usage)

    async with asyncio.TaskGroup() as clients:
        for number in range(scenario.clients):
            clients.create_task(client(number))
    return tally


def _fault(reply: Reply, scenario: Scenario, *, usage_asked: bool) -> str | None:
    """Return what is wrong with an answer; None for a good one."""
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:200].decode(errors='replace')}"
    if reply.stream is None:
        try:
            completion = _completion.decode(reply.body)
        except msgspec.DecodeError as error:
            return f"not a chat completion: {error}"
        reasons = [choice.finish_reason for choice in completion.choices]
        if not reasons or not all(reasons):
            return "no finish_reason"
        return _wrong_count(completion.usage.completion_tokens, scenario.max_tokens)
    ending = reply.stream.ending()
    if ending.error is not None:
        return f"the stream holds an error: {ending.error}"
    if not ending.done:
        return "the stream ended without [DONE]"
    if ending.finish_reason is None:
        return "the stream ended without a finish_reason"
    if not usage_asked:
        return None
    if ending.completion_tokens is None:
        return "the stream ended without the usage that was asked for"
    return _wrong_count(ending.completion_tokens, scenario.max_tokens)


def _wrong_count(got: int, wanted: int) -> str | None:
    return None if got == wanted else f"{got} completion tokens, not {wanted}"


def _ms(ordered: list[float], share: float) -> float | None:
    return percentile(ordered, share) * 1000 if ordered else None


async def cpu_per_request(
    target: Target, path: str, bodies: Iterable[bytes], *, clients: int
) -> tuple[float, list[bytes]]:
    """Return the CPU seconds that the target's meter counts for each of these requests, and what was replied.

    Raises:
        ChildFailed: a reply is no success.
    """
    left, replies = iter(bodies), list[bytes]()
    before = await target.meter.read()

    async def client() -> None:
        connection = await Connection.open(target.endpoint)
        try:
            for body in left:
                request = target.endpoint.post(path, body)
                reply = await connection.exchange(request, stream=False, timeout=target.request_timeout)
                if reply.status != 200:
                    raise ChildFailed(f"{target.name}: status {reply.status}: {reply.body[:200]!r}")
                replies.append(reply.body)
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    after = await target.meter.read()
    return ((after.cpu_seconds or 0.0) - (before.cpu_seconds or 0.0)) / len(replies), replies
