"""The SQLite store keeps its contract, and what it promises of its file."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from dynamo_core import ResponseStore, ResponseStoreServices
from dynamo_core.errors import ConfigError, Unavailable
from dynamo_plugin_response_store_sqlite.store import SQLiteStore, SQLiteStoreConfig
from dynamo_telemetry import Metrics
from dynamo_testing import ResponseStoreFactory, ResponseStoreKit

MB = 1024 * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


def make(path: Path, **settings: object) -> SQLiteStore:
    config = SQLiteStoreConfig.model_validate({"path": path, **settings})
    return SQLiteStore(config, ResponseStoreServices(Metrics(), "tests"))


class TestContract(ResponseStoreKit):
    """Every promise of a response store; another program that holds the file is how it is away."""

    BOUND: ClassVar[int | None] = MB

    @pytest.fixture
    def make_store(self, path: Path) -> ResponseStoreFactory:
        return lambda services: SQLiteStore(SQLiteStoreConfig(path=path, max_mb=1, timeout=5.0), services)

    async def take_away(self, store: ResponseStore) -> None:
        assert isinstance(store, SQLiteStore)
        await store.aclose()
        # A reader of a file in WAL mode never waits for a writer: only a path that is no file stops it.
        self.kept = store.config.path.rename(store.config.path.with_suffix(".away"))
        store.config.path.mkdir()
        store.__init__(store.config, store.services)  # type: ignore[misc]

    async def bring_back(self, store: ResponseStore) -> None:
        assert isinstance(store, SQLiteStore)
        store.config.path.rmdir()
        self.kept.rename(store.config.path)


async def test_a_writer_blocked_by_another_process_times_out(path: Path) -> None:
    async with make(path, timeout=0.1) as store:
        await store.start()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(Unavailable, match="locked"):
            await store.put("me", {"a": b"1"}, 60)
        other.execute("ROLLBACK")
        other.close()

        assert await store.put("me", {"a": b"1"}, 60)


async def test_acknowledged_writes_survive_a_kill(path: Path) -> None:
    program = f"""
import asyncio, os, pathlib
from dynamo_core import ResponseStoreServices
from dynamo_telemetry import Metrics
from dynamo_plugin_response_store_sqlite.store import SQLiteStore, SQLiteStoreConfig

async def main():
    store = SQLiteStore(SQLiteStoreConfig(path=pathlib.Path({str(path)!r})), ResponseStoreServices(Metrics(), "tests"))
    await store.start()
    await store.put("me", {{"a": b"1"}}, 60)
    os._exit(9)

asyncio.run(main())
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], timeout=40, check=False)

    assert done.returncode == 9
    async with make(path) as store:
        await store.start()
        assert await store.get("me", ["a"]) == [b"1"]


async def test_expired_records_leave_the_file(path: Path) -> None:
    async with make(path) as store:
        await store.start()
        await store.put("me", {str(number): b"1" for number in range(10)}, 0.001)
        await asyncio.sleep(0.01)
        await store.put("me", {"a": b"22"}, 60)

    with sqlite3.connect(path) as file:
        assert file.execute("SELECT key FROM records").fetchall() == [("a",)]
        assert file.execute("SELECT bytes FROM total").fetchone() == (2 + 256,)
        assert file.execute("SELECT value FROM contents").fetchall() == [(b"22",)]
    file.close()


async def test_a_folder_that_is_not_there_is_an_error_of_the_config(tmp_path: Path) -> None:
    store = make(tmp_path / "none" / "responses.db")

    with pytest.raises(ConfigError, match=r"frontend\.response_store\.path: .*none is not a folder: make it"):
        await store.start()
    await store.aclose()


async def test_a_file_of_another_version_is_refused_and_left_as_it_is(path: Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 7")
    file.close()
    store = make(path)

    with pytest.raises(ConfigError, match="version 7 of another"):
        await store.start()
    await store.aclose()


async def test_look_ups_cost_no_more_beside_large_records_of_another_owner(path: Path) -> None:
    async with make(path) as store:
        await store.start()
        await store.put("me", {str(number): b"1" for number in range(20)}, 600)

        async def cost() -> float:
            begun = time.process_time()
            for number in range(100):
                await store.get("me", [str(number % 20)], 600)
            return time.process_time() - begun

        alone = min([await cost() for _ in range(3)])
        for number in range(16):
            await store.put("zed", {str(number): bytes(6 * MB)}, 600)

        assert min([await cost() for _ in range(3)]) < 3 * alone


async def test_a_look_up_does_not_wait_for_a_writer(path: Path) -> None:
    async with make(path, timeout=20) as store:
        await store.start()
        await store.put("me", {"a": b"1"}, 600)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        async with asyncio.timeout(10):
            found = await store.get("me", ["a"], 1200)
        other.execute("ROLLBACK")
        other.close()

    # The renewal came after the writer.
    with sqlite3.connect(path) as file:
        assert found == [b"1"]
        assert file.execute("SELECT expires > ? FROM records", (time.time() + 900,)).fetchone() == (1,)
    file.close()


async def test_an_owner_that_writes_a_lot_does_not_hold_up_another(path: Path) -> None:
    async with make(path) as store:
        await store.start()
        done: list[str] = []

        async def put(owner: str, key: str) -> None:
            await store.put(owner, {key: bytes(MB)}, 600)
            done.append(owner)

        await asyncio.gather(*(put("zed", str(number)) for number in range(20)), put("me", "a"))

        assert done.index("me") < 4
