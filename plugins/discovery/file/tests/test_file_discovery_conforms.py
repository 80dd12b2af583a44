"""The shipped kit, run on file discovery: two objects on one folder, as in two processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dynamo_plugin_discovery_file.discovery import FileConfig, FileDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class TestFileDiscovery(DiscoveryKit):
    TTL = 1.0
    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True

    @pytest.fixture
    async def directories(self, tmp_path: Path) -> AsyncIterator[Directories]:
        config = FileConfig(path=str(tmp_path / "discovery"), ttl=1.0, poll=0.02)
        one, other = FileDiscovery(config, Metrics()), FileDiscovery(config, Metrics())
        await one.start()
        await other.start()
        yield Directories(one=one, other=other)
        await one.aclose()
        await other.aclose()

    async def kill_owner(self, directories: Directories) -> None:
        assert isinstance(directories.one, FileDiscovery)
        # Its heartbeats end; nothing is removed.
        directories.one._heartbeats.stop(self.WAIT)

    async def cut_store(self, directories: Directories) -> None:
        path = self._path(directories)
        path.rename(path.with_name("aside"))
        path.write_text("in the way")

    async def restore_store(self, directories: Directories) -> None:
        path = self._path(directories)
        path.unlink()
        path.with_name("aside").rename(path)

    @staticmethod
    def _path(directories: Directories) -> Path:
        assert isinstance(directories.one, FileDiscovery)
        return directories.one.path
