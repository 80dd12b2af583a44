"""Checks of an engine's own reports: cache events and load."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from dynamo_core.contracts.engine import EngineConfig, KvEventSource, LLMEngine, LoadSource
from dynamo_core.contracts.engine_boundary import call_async, check_sources
from dynamo_core.protocol.events import KvEvent

from dynamo_testing.engine.bench import Bench, Skipped
from dynamo_testing.engine.bounded_calls import told, within
from dynamo_testing.engine.failures import (
    ConformanceFailure,
    KvEventsFailed,
    KvEventSourcesFailed,
    KvEventSourcesNotIdempotent,
    LoadSourcesFailed,
    LoadSourcesNotIdempotent,
)
from dynamo_testing.engine.streams import Reading, counted

SourceT = TypeVar("SourceT", KvEventSource, LoadSource)

#: The longest prompt that is made to fill a block of the cache, in tokens.
LONGEST_PROMPT = 1024


async def kv_event_sources(bench: Bench) -> str:
    """Check that the sources of cache events name the same ranks when asked twice, and can be subscribed to."""
    return _listed(await _listen(bench))


async def load_sources(bench: Bench) -> str:
    """Check that the sources of loads name the same ranks when asked twice, and can be subscribed to."""
    engine, _ = await bench.running()
    sources = await _ask_twice(
        bench, engine, "load_sources", LoadSource, failed=LoadSourcesFailed, unstable=LoadSourcesNotIdempotent
    )
    for source in sources:
        _subscribe(source, lambda load: None, failed=LoadSourcesFailed)
    return _listed([source.dp_rank for source in sources])


async def kv_events(bench: Bench) -> str:
    """Check that the cache events of a rank count up by one from 0, and come in the event loop's thread."""
    engine, config = await bench.running()
    if not await _listen(bench):
        raise Skipped("it does not tell of its cache")
    reading = Reading()
    request = await bench.request(prompt=_prompt_length(config))
    await reading.read(engine, request, bench.context(), bench.plan.request_timeout)
    bench.check(reading)
    expected: Counter[int] = Counter()
    for rank, event, in_loop in bench.heard:
        if not isinstance(event, KvEvent):
            raise KvEventsFailed(f"rank {rank} told a {type(event).__name__}, not KvEvent")
        if not in_loop:
            raise KvEventsFailed(f"event {event.event_id} of rank {rank} was told in another thread")
        if event.dp_rank != rank:
            raise KvEventsFailed(f"the source of rank {rank} told an event of rank {event.dp_rank}")
        if event.event_id != expected[rank]:
            raise KvEventsFailed(f"event {expected[rank]} of rank {rank} was expected, event {event.event_id} came")
        expected[rank] += 1
    return f"{counted(sum(expected.values()), 'event')}, in order"


async def _listen(bench: Bench) -> list[int]:
    """Subscribe to the sources of cache events, if that has not been done; their ranks."""
    engine, _ = await bench.running()
    if bench.cache_ranks is not None:
        return bench.cache_ranks
    sources = await _ask_twice(
        bench,
        engine,
        "kv_event_sources",
        KvEventSource,
        failed=KvEventSourcesFailed,
        unstable=KvEventSourcesNotIdempotent,
    )
    thread = threading.get_ident()
    for source in sources:

        def hear(event: KvEvent, rank: int = source.dp_rank) -> None:
            bench.heard.append((rank, event, threading.get_ident() == thread))

        _subscribe(source, hear, failed=KvEventSourcesFailed)
    bench.cache_ranks = [source.dp_rank for source in sources]
    return bench.cache_ranks


async def _ask_twice(
    bench: Bench,
    engine: LLMEngine,
    method: str,
    kind: type[SourceT],
    *,
    failed: type[ConformanceFailure],
    unstable: type[ConformanceFailure],
) -> list[SourceT]:
    answers = []
    for _ in range(2):
        try:
            answer = await within(call_async(engine, method), bench.plan.request_timeout)
            check_sources(engine, method, answer, kind)
        except Exception as error:
            raise failed(f"{method} {told(error)}") from error
        answers.append(list(answer))
    first, second = ([source.dp_rank for source in answer] for answer in answers)
    if first != second:
        raise unstable(f"asked once it named the ranks {first}, asked again {second}")
    if len(set(first)) != len(first):
        raise failed(f"{method} named a rank twice: {first}")
    return answers[1]


def _subscribe(
    source: KvEventSource | LoadSource, listener: Callable[[Any], None], *, failed: type[ConformanceFailure]
) -> None:
    try:
        source.subscribe(listener)
    except Exception as error:
        raise failed(f"subscribe of rank {source.dp_rank} {told(error)}") from error


def _listed(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else "none"


def _prompt_length(config: EngineConfig) -> int | None:
    """Return a prompt that fills two blocks of the cache, where that is known and not too long; None: the usual one."""
    block = config.kv_cache_block_size
    if block is None:
        return None
    length = 2 * block + 1
    fits = length <= LONGEST_PROMPT and (config.context_length is None or length <= config.context_length // 2)
    return length if fits else None
