"""A record that no worker of ours writes is left out, with one warning; everything else goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import CARDS, INSTANCES, RuntimeConfig
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.discovery import RedisDiscovery
from dynamo_plugin_discovery_redis.store import Store

from tests.e2e.brokers import Redis
from tests.integration.parts import Plain

#: As deep as fits into a record.
NESTED = b'{"name": "m", "instance_id": 1, "runtime_config": {"runtime_data": {"a": ' + b"[" * 30_000
DEPTH = b'{"a":' * 300 + b"1" + b"}" * 300

BAD_CARDS = {
    "nested without end": NESTED,
    "nested deeper than can be worked with": b'{"name": "m", "instance_id": 1, "runtime_config": {"runtime_data": '
    + DEPTH
    + b"}}",
    "a long name": msgspec.json.encode(ModelCard(name="x" * 60_000, instance_id=1)),
    "a name that turns the direction": msgspec.json.encode(ModelCard(name="m\u202egnp.exe", instance_id=1)),
    "a name that steers a terminal": msgspec.json.encode(ModelCard(name="m\x1b[2J", instance_id=1)),
    "a blank name": msgspec.json.encode(ModelCard(name=" ", instance_id=1)),
    "ranks without number": msgspec.json.encode(
        ModelCard(name="m", instance_id=1, runtime_config=RuntimeConfig(data_parallel_size=2**62))
    ),
    "blocks of no tokens": msgspec.json.encode(ModelCard(name="m", instance_id=1, kv_cache_block_size=0)),
    "not UTF-8": b'{"name": "\xff", "instance_id": 1}',
}


@pytest.mark.parametrize("what", BAD_CARDS)
async def test_a_bad_card_is_left_out_with_one_warning_and_its_neighbours_serve(
    house: Any, tokens_of: Any, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    lease = await house.discovery.lease()
    # As from another version of the store, which checks nothing.
    for _ in range(3):
        await lease.put(CARDS + "bad", BAD_CARDS[what])
        await lease.put(INSTANCES + "bad", msgspec.json.encode(Instance(instance_id=1)))
    await house.run(Plain)
    await lease.put(CARDS + "bad", BAD_CARDS[what] + b" ")
    await house.run(Plain, worker="w2")

    assert [(model.name, model.instance_count) for model in house.models.list()] == [("m", 2)]
    assert await tokens_of(await house.generate([1])) == [7]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert warning.startswith("record 'v1/mdc/bad' cannot be read and is left out: ")
    assert len(warning) < 1000
    assert warning.isprintable()


@pytest.mark.parametrize("value", [b'{"frontend_id":1}', b"\xff"])
async def test_records_of_a_kind_that_the_view_of_workers_does_not_know_are_ignored_in_silence(
    house: Any, tokens_of: Any, caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    lease = await house.discovery.lease()
    for key in ("v1/frontends/dynamo/1", "v1/invented_later/1"):
        await lease.put(key, value)
    await house.run(Plain)
    await lease.aclose()

    assert await tokens_of(await house.generate([1])) == [7]
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Redis]:
    with Redis(tmp_path) as server:
        yield server


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.full)])
async def test_a_frontend_serves_while_two_writers_put_nested_records_as_fast_as_they_can(
    make_house: Any, store: Redis, tokens_of: Any, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    config = RedisConfig(url=store.url)
    house = make_house(store=lambda metrics: RedisDiscovery(config, metrics))
    written = [0, 0]
    answered = 0
    begun, over = time.monotonic(), threading.Event()

    def write(number: int) -> None:
        writer = Store(config)
        while not over.is_set():
            for key in (f"{CARDS}bad{number}", f"{INSTANCES}bad{number}", f"{CARDS}{number}/{written[number]}"):
                writer.put_value(key, NESTED)
            writer.put_value(key, None)
            written[number] += 1
        writer.close()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        # It registers, and is found, in the middle of it.
        await house.run(Plain)
        while time.monotonic() < begun + seconds or min(*written, answered) <= 10:
            async with asyncio.timeout(30):
                answered += await tokens_of(await house.generate([1])) == [7]
                await asyncio.sleep(0.01)
    finally:
        over.set()
        await asyncio.gather(*(asyncio.to_thread(writer.join) for writer in writers))

    took = time.monotonic() - begun
    assert not house.models.stale
    warnings = [record for record in caplog.records if record.levelname != "INFO"]
    assert 0 < len(warnings) <= 10 + took
    assert all(record.exc_info is None for record in warnings)
