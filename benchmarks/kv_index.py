"""What the `kv` router costs: lookup, cost and choice; a whole decision with hashing and accounting; taking in events.

64 ranks that hold 1 M blocks between them, and a prompt of 512 blocks, of which some hold the beginning. Medians of
rounds of CPU time, in one process and without workers, so that nothing but the router is measured.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import Any, Final, cast

import msgspec
from dynamo_core import (
    KvBlock,
    KvEvent,
    KvRemoved,
    KvStored,
    PreprocessedRequest,
    Route,
    RouterEvent,
    RouterServices,
    RoutingRequest,
)
from dynamo_core.kv import block_hashes, sequence_hashes
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import RuntimeConfig
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_telemetry import Metrics

BLOCK: Final = 16
#: What is promised, in microseconds and blocks per second.
LOOKUP_LIMIT: Final = 60.0
DECISION_LIMIT: Final = 250.0
INGEST_LIMIT: Final = 300_000.0
#: What is printed beside it, and promised nothing about: no fleet looks so.
WORST: Final = "worst case"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks kv`."""
    parser.add_argument("--ranks", type=int, default=64, help="workers of one rank each (default %(default)s)")
    parser.add_argument("--stored", type=int, default=1_000_000, help="blocks that all hold (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=512, help="full blocks of the prompt (default %(default)s)")
    parser.add_argument("--active", type=int, default=8, help="requests running on each rank (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each figure (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def run_kv(options: argparse.Namespace) -> int:
    """Print the figures; return the exit code: 1 if one of them is above what is promised."""
    return asyncio.run(_run(options))


class Fleet:
    """A pool of workers that exist on paper, and its router."""

    model = "m"
    role = "aggregated"
    version = 1

    def __init__(self, ranks: int) -> None:
        self.instances: Mapping[int, Instance] = {one: Instance(instance_id=one) for one in range(1, ranks + 1)}
        self.cards: Mapping[int, ModelCard] = {
            one: ModelCard(
                name="m",
                instance_id=one,
                kv_cache_block_size=BLOCK,
                runtime_config=RuntimeConfig(enable_local_indexer=False),
            )
            for one in self.instances
        }
        self.in_service = self.instances.keys()
        self._all = tuple(self.instances.values())
        self.tracker = LoadTracker()
        nothing = cast(Any, None)
        services = RouterServices(
            pool=self, tracker=self.tracker, events=nothing, directory=nothing, metrics=Metrics(), call=nothing
        )
        self.router = KvRouter(KvConfig(), services)

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        return self._all

    async def decide(self, tokens: list[int], name: str) -> None:
        """Decide, with hashing, choice, and the accounting of a request that comes, is prefilled, and leaves."""
        asked = RoutingRequest(PreprocessedRequest(token_ids=tokens), name)
        route = await self.router.route(asked, self)
        reservation = self.reserve(route, asked, name)
        reservation.first_item()
        reservation.release()

    def reserve(self, route: Route, asked: RoutingRequest, name: str) -> Any:
        """Count a request in."""
        return self.tracker.reserve(
            route,
            name,
            prompt_tokens=len(asked.request.token_ids),
            block_size=BLOCK,
            hashes=asked.known_hashes(BLOCK),
        )


async def _run(options: argparse.Namespace) -> int:
    draw = random.Random(1)
    fleet = Fleet(options.ranks)
    figures: dict[str, float] = {}
    await fleet.router.route(RoutingRequest(PreprocessedRequest(token_ids=[1]), "first"), fleet)
    figures["ingest, 64 blocks an event, decoded (blocks/s)"] = _ingest(fleet, options.stored, draw)
    tokens = [draw.randrange(100_000) for _ in range(options.blocks * BLOCK + 5)]
    for name, depths in _mixes(options).items():
        _hold(fleet, tokens, depths)
        running = await _load(fleet, tokens, options.active, draw)
        asked = RoutingRequest(PreprocessedRequest(token_ids=tokens), "asked")
        asked.hashes(BLOCK)

        async def choose(asked: RoutingRequest = asked) -> None:
            await fleet.router.route(asked, fleet)

        async def decide() -> None:
            await fleet.decide(tokens, "timed")

        figures[f"lookup, cost, choice: {name} (µs)"] = await _median(choose, options.rounds)
        figures[f"with hashing and accounting: {name} (µs)"] = await _median(decide, options.rounds)
        for reservation in running:
            reservation.release()
    figures["ingest, 1 block an event, 16 events a message (blocks/s)"] = _ingest_messages(fleet, draw, 1, 16)
    figures["ingest, 64 blocks an event, 1 event a message (blocks/s)"] = _ingest_messages(fleet, draw, 64, 1)
    figures["eviction, 64 blocks an event, decoded (blocks/s)"] = _evict(fleet, draw)
    await fleet.router.aclose()
    return _publish(figures, options)


def _mixes(options: argparse.Namespace) -> dict[str, list[int]]:
    """Return how many blocks of the prompt each rank holds."""
    ranks, blocks = options.ranks, options.blocks
    return {
        "no worker holds any of it": [0] * ranks,
        "all hold 1/8, four hold more": [
            blocks * (4 + number) // 8 if number < 4 else blocks // 8 for number in range(ranks)
        ],
        "all hold it whole": [blocks] * ranks,
        f"{WORST}, each rank another depth": [blocks * (number + 1) // ranks for number in range(ranks)],
    }


def _ingest(fleet: Fleet, stored: int, draw: random.Random) -> float:
    workers = list(fleet.instances)
    events = []
    for number in range(stored // 64):
        blocks = [KvBlock(draw.getrandbits(64), draw.getrandbits(64)) for _ in range(64)]
        worker = workers[number % len(workers)]
        events.append(RouterEvent(worker, KvEvent(number // len(workers), KvStored(blocks=blocks)), 1))
    on_event = fleet.router._follower.on_event
    begun = thread_time()
    for event in events:
        on_event(event)
    return len(events) * 64 / (thread_time() - begun)


def _ingest_messages(fleet: Fleet, draw: random.Random, size: int, together: int) -> float:
    """Ingest one new worker's messages, decoding included."""
    encode = msgspec.msgpack.Encoder().encode
    total = 50_000 // size * size
    router, worker = fleet.router, 1
    router._follower.remove(worker)
    router._follower.add(worker, has_history=False)
    events = []
    parent: int | None = None
    for number in range(total // size):
        blocks = [KvBlock(draw.getrandbits(64), draw.getrandbits(64)) for _ in range(size)]
        events.append(RouterEvent(worker, KvEvent(number, KvStored(blocks=blocks, parent_hash=parent)), 1))
        parent = blocks[-1].block_hash if number % 100 else None
    messages = [encode(events[at : at + together]) for at in range(0, len(events), together)]
    begun = thread_time()
    for message in messages:
        router._on_message(0, message)
    return total / (thread_time() - begun)


def _evict(fleet: Fleet, draw: random.Random) -> float:
    index = fleet.router._index
    rank = (2, 0)
    index.clear(rank)
    names = [[draw.getrandbits(64) for _ in range(64)] for _ in range(500)]
    for chain in names:
        index.store(rank, None, [KvBlock(name, draw.getrandbits(64)) for name in chain])
    events = [KvEvent(0, KvRemoved(block_hashes=chain[::-1])) for chain in names]
    begun = thread_time()
    for event in events:
        index.apply(rank, event)
    return len(events) * 64 / (thread_time() - begun)


def _hold(fleet: Fleet, tokens: list[int], depths: Sequence[int]) -> None:
    blocks = block_hashes(tokens, BLOCK)
    chain = sequence_hashes(blocks)
    pairs = [KvBlock(*pair) for pair in zip(chain, blocks, strict=True)]
    index = fleet.router._index
    for worker, depth in zip(fleet.instances, depths, strict=True):
        index.remove((worker, 0), chain)
        if depth:
            index.store((worker, 0), None, pairs[:depth])


async def _load(fleet: Fleet, tokens: list[int], active: int, draw: random.Random) -> list[Any]:
    """Return running requests: on each rank one that shares the prompt's first half, and others that share nothing."""
    reservations = []
    for worker, instance in fleet.instances.items():
        for number in range(active):
            own = [draw.randrange(100_000) for _ in range(1000)]
            prompt = own if number else [*tokens[: len(tokens) // 2], *own]
            asked = RoutingRequest(PreprocessedRequest(token_ids=prompt), f"{worker}-{number}")
            asked.hashes(BLOCK)
            reservations.append(fleet.reserve(Route(instance), asked, asked.request_id))
    return reservations


async def _median(work: Callable[[], Any], rounds: int, times: int = 300) -> float:
    """Return microseconds of one call."""
    found = []
    for _ in range(rounds):
        begun = thread_time()
        for _ in range(times):
            await work()
        found.append((thread_time() - begun) / times * 1e6)
    return statistics.median(found)


def _publish(figures: dict[str, float], options: argparse.Namespace) -> int:
    print(
        f"{options.ranks} ranks, {options.stored} blocks stored, a prompt of {options.blocks} blocks of {BLOCK} tokens"
    )
    failed = False
    for name, figure in figures.items():
        limit, bad = INGEST_LIMIT, figure < INGEST_LIMIT
        if name.startswith("lookup"):
            limit, bad = LOOKUP_LIMIT, figure > LOOKUP_LIMIT
        elif name.startswith("with"):
            limit, bad = DECISION_LIMIT, figure > DECISION_LIMIT
        verdict = f"promised {limit:>9,.0f}{'   MISSED' if bad else ''}"
        if WORST in name:
            verdict = ""
        else:
            failed |= bad
        print(f"  {name:<75} {figure:>12,.1f}   {verdict}".rstrip())
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(failed)
