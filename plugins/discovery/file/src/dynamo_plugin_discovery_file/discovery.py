"""`FileDiscovery`: the plugin. Leases and watches of one process over a folder shared with others."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from dynamo_core import Discovery, Lease, MetricsScope, PluginConfig, WatchEvent
from dynamo_core.errors import ConfigError
from dynamo_leases import (
    NO_LEASE,
    Fanout,
    HeartbeatThread,
    Poller,
    check_record,
    check_times,
    check_ttl,
    heartbeat_interval,
    new_lease_id,
)
from pydantic import Field, field_validator, model_validator

from dynamo_plugin_discovery_file.clock import SYSTEM, Clock
from dynamo_plugin_discovery_file.folder import RECORDS, Folder
from dynamo_plugin_discovery_file.lease import FileLease, cannot_write
from dynamo_plugin_discovery_file.record import Record, encode, file_name
from dynamo_plugin_discovery_file.scanner import Scanner

#: Seconds that ending the heartbeats may take.
STOP_TIMEOUT = 5.0


class FileConfig(PluginConfig):
    """Settings of file discovery. Times are in seconds."""

    path: str | None = Field(
        default=None, description="The folder; null means `dynamo-discovery-<user id>` below the host's temp folder."
    )
    ttl: float = Field(
        default=3.0, ge=0.1, le=3600, description="Seconds without a heartbeat after which a process counts as dead."
    )
    heartbeat: float | None = Field(
        default=None, gt=0, description="Seconds between two heartbeats; null means a third of `ttl`."
    )
    poll: float = Field(default=0.25, gt=0, description="Seconds between two looks at the folder.")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        """Find what can be no folder without making one, so that `dynamo check` tells of it."""
        if path is not None:
            folder = Path(path).expanduser().absolute()
            there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
            if not there.is_dir():
                raise ValueError(f"{folder} {'' if there == folder else f'cannot be made: {there} '}is no folder")
            if there != folder and not os.access(there, os.W_OK | os.X_OK):
                raise ValueError(f"{folder} cannot be made: {there} may not be written to")
        return path

    @model_validator(mode="after")
    def _check_times(self) -> FileConfig:
        check_times(self.ttl, 2, heartbeat=self.heartbeat)
        check_times(self.ttl, 3, poll=self.poll)
        return self


class FileDiscovery(Discovery):
    """Discovery for the processes of one user on one host.

    Heartbeats come from a thread, so that an engine that blocks the event loop while it starts is not taken for dead.
    One task looks at the folder for all watches of the process, from the first watch on.
    """

    NAME = "file"
    Config = FileConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope, *, clock: Clock = SYSTEM) -> None:
        super().__init__(config, metrics)
        assert isinstance(config, FileConfig)  # noqa: S101 - the loader validates with `Config`
        self._settings = config
        self._clock = clock
        self._folder = Folder(_path(config), clock)
        self._heartbeats = HeartbeatThread(clock.monotonic)
        self._scanner = Scanner(self._folder, ttl=config.ttl, clock=clock)
        self._leases: set[FileLease] = set()
        self._fanout = Fanout()
        self._poller = Poller(self._poll_once, config.poll)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    async def start(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made, or must not be used: it belongs to another user.
        """
        try:
            await asyncio.to_thread(self._folder.prepare)
        except OSError as error:
            reason = str(error) if error.errno is None else f"{self.path} cannot be used: {error.strerror}"
            raise ConfigError(f"discovery.path: {reason}", cause=error) from error

    async def lease(self, ttl: float | None = None) -> Lease:
        """See `Discovery.lease`.

        Raises:
            CannotConnect: the folder cannot be written.
            ValueError: discovery is closed.
        """
        settings = self._settings
        seconds = settings.ttl if ttl is None else ttl
        check_ttl(seconds)
        if self._fanout.is_closed():
            raise ValueError("discovery is closed")
        lease = FileLease(
            self._folder,
            new_lease_id(),
            ttl=seconds,
            heartbeat=heartbeat_interval(seconds, settings.heartbeat),
            clock=self._clock,
            on_change=self._poller.poll_soon,
        )
        try:
            await asyncio.to_thread(lease.register)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        if self._fanout.is_closed():
            await lease.aclose()
            raise ValueError("discovery is closed")
        self._leases = {other for other in self._leases if not other.ended} | {lease}
        self._heartbeats.add(lease)
        return lease

    def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """See `Discovery.watch`. Before a folder that cannot be read there is no snapshot: `STALE` until it can."""
        return self._fanout.watch(prefix, self._poller.poll)

    async def put_value(self, key: str, value: bytes | None) -> None:
        """See `Discovery.put_value`.

        Raises:
            ValueError: the key or the value is too large.
            CannotConnect: the folder cannot be written.
        """
        check_record(key, value or b"")
        try:
            await asyncio.to_thread(self._put_value, key, value)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._poller.poll_soon()

    async def aclose(self) -> None:
        self._fanout.close()
        leases, self._leases = self._leases, set()
        await asyncio.gather(*(lease.aclose() for lease in leases))
        await self._poller.aclose()
        await asyncio.to_thread(self._heartbeats.stop, STOP_TIMEOUT)

    def _put_value(self, key: str, value: bytes | None) -> None:
        name = f"{RECORDS}/{file_name(key)}"
        if value is None:
            with self._folder.open() as place:
                place.remove(name)
            return
        data = encode(Record(key, value, NO_LEASE))
        try:
            with self._folder.open() as place:
                place.write(name, data)
        except FileNotFoundError:
            self._folder.prepare()
            with self._folder.open() as place:
                place.write(name, data)

    async def _poll_once(self) -> None:
        # Reading a thousand files takes some milliseconds; requests do not wait for that.
        events = await asyncio.to_thread(self._scanner.poll)
        self._fanout.publish(events, synced=self._scanner.synced)


def _path(config: FileConfig) -> Path:
    if config.path is not None:
        return Path(config.path).expanduser().absolute()
    return Path(tempfile.gettempdir()) / f"dynamo-discovery-{os.geteuid()}"
