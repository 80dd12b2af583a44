"""Watched files: replaced behind a link as mounts do it, half written, gone, or changed while a reload is busy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dynamo_runtime.assembly.reload import ReloadReport
from dynamo_runtime.processes import reload_triggers as module
from dynamo_runtime.processes.reload_triggers import ReloadTriggers


class Reloads:
    """Notes the content that each reload finds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: asyncio.Queue[str] = asyncio.Queue()
        self.busy = 0

    async def __call__(self, dry_run: bool) -> ReloadReport:
        self.found.put_nowait(self.path.read_text() if self.path.exists() else "-")
        self.busy -= 1
        return ReloadReport("busy" if self.busy >= 0 else "applied")

    async def next(self) -> str:
        async with asyncio.timeout(20):
            return await self.found.get()


Watch = Callable[[Path], Reloads]
Watched = tuple[Path, Reloads]


@pytest.fixture
async def watch(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    monkeypatch.setattr(module, "LOOK", 0.02)
    made: list[ReloadTriggers] = []

    def start(path: Path) -> Reloads:
        reloads = Reloads(path)
        made.append(ReloadTriggers(reloads, lambda: [path], watch=True))
        return reloads

    yield start
    for triggers in made:
        await triggers.aclose()


async def looked(write: Callable[[str], object], reloads: Reloads) -> None:
    """Return once the first look is over, and the file holds ``begin``: only what changes after it is told."""
    while reloads.found.empty():
        for text in ("warm", "begin"):
            write(text)
            await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        while await reloads.found.get() != "begin":
            pass


async def test_a_mounted_file_that_is_replaced_behind_its_link_is_read_again(tmp_path: Path, watch: Watch) -> None:
    data, config = tmp_path / "..data", tmp_path / "config.yaml"
    config.symlink_to("..data/config.yaml")

    def mount(text: str) -> None:
        folder = tmp_path / text
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(text)
        (tmp_path / "new").symlink_to(text)
        os.replace(tmp_path / "new", data)

    mount("begin")
    reloads = watch(config)
    await looked(mount, reloads)

    mount("other")

    assert await reloads.next() == "other"


@pytest.fixture
async def watched(tmp_path: Path, watch: Watch) -> Watched:
    """Return a file that was looked at, and holds ``begin``."""
    config = tmp_path / "config.yaml"
    config.write_text("begin")
    reloads = watch(config)
    await looked(config.write_text, reloads)
    return config, reloads


async def test_the_same_content_in_a_new_file_is_no_change(watched: Watched) -> None:
    config, reloads = watched

    new = config.with_suffix(".new")
    new.write_text("begin")
    os.replace(new, config)
    await asyncio.sleep(0.2)
    config.write_text("other")

    assert await reloads.next() == "other"
    assert reloads.found.empty()


async def test_a_busy_reload_is_tried_again_and_a_refused_one_is_not(watched: Watched) -> None:
    config, reloads = watched
    reloads.busy = 2
    config.write_text("new")

    assert [await reloads.next() for _ in range(3)] == ["new"] * 3
    await asyncio.sleep(0.2)
    assert reloads.found.empty()


async def test_a_missing_file_triggers_a_reload(watched: Watched) -> None:
    config, reloads = watched
    config.unlink()

    assert await reloads.next() == "-"
    config.write_text("back")
    assert await reloads.next() == "back"


async def test_without_watch_nothing_is_looked_at_and_a_hang_up_reloads(tmp_path: Path) -> None:
    reloads = Reloads(tmp_path / "none")
    async with ReloadTriggers(reloads, lambda: [tmp_path / "none"], watch=False) as triggers:
        triggers.hung_up()

        assert await reloads.next() == "-"
