"""A folder, a clock that the test turns, and parts of discovery driven step by step."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dynamo_core import WatchEvent, WatchKind
from dynamo_leases import NO_LEASE
from dynamo_plugin_discovery_file.clock import Clock
from dynamo_plugin_discovery_file.discovery import FileConfig, FileDiscovery
from dynamo_plugin_discovery_file.folder import RECORDS, Folder
from dynamo_plugin_discovery_file.lease import FileLease
from dynamo_plugin_discovery_file.record import Record, encode, file_name
from dynamo_plugin_discovery_file.scanner import Scanner
from dynamo_telemetry import Metrics

TTL = 3.0
HEARTBEAT = 1.0
POLL = 0.25


@dataclass
class Turned:
    """Both clocks; `jump` moves the host's alone."""

    monotonic: float = 1000.0
    wall: int = 1_700_000_000 * 10**9

    def advance(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += round(seconds * 1e9)

    def jump(self, seconds: float) -> None:
        self.wall += round(seconds * 1e9)

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic, lambda: self.wall)


@dataclass
class View:
    """What one process sees, told by a scanner's changes."""

    scanner: Scanner
    records: dict[str, bytes] = field(default_factory=dict)
    kinds: list[WatchKind] = field(default_factory=list)

    def poll(self) -> list[WatchEvent]:
        events = self.scanner.poll()
        for event in events:
            self.kinds.append(event.kind)
            if event.kind is WatchKind.PUT:
                self.records[event.key] = event.value
            elif event.kind is WatchKind.DELETE:
                del self.records[event.key]
        return events


class Host:
    """A host with processes that share a folder: leases beat and views poll only when the test says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = Turned()
        self.alive: list[FileLease] = []
        self.views: list[View] = []

    def folder(self) -> Folder:
        return Folder(self.path, self.time.clock)

    def lease(self, *, ttl: float = TTL, heartbeat: float = HEARTBEAT) -> FileLease:
        lease = FileLease(
            self.folder(),
            random.randrange(1, 2**63),
            ttl=ttl,
            heartbeat=heartbeat,
            clock=self.time.clock,
            on_change=lambda: None,
        )
        lease.register()
        self.alive.append(lease)
        return lease

    def kill(self, lease: FileLease) -> None:
        """End the process of a lease without a goodbye."""
        self.alive.remove(lease)

    def put_value(self, key: str, value: bytes) -> None:
        self.folder().prepare()
        with self.folder().open() as place:
            place.write(f"{RECORDS}/{file_name(key)}", encode(Record(key, value, NO_LEASE)))

    def view(self) -> View:
        view = View(Scanner(self.folder(), ttl=TTL, clock=self.time.clock))
        self.views.append(view)
        return view

    def run(self, seconds: float, *, beats: bool = True) -> None:
        """Time goes by in steps of one poll: live leases beat when they are due, and views look."""
        for _ in range(round(seconds / POLL)):
            self.time.advance(POLL)
            if beats:
                self.beat()
            for view in self.views:
                view.poll()

    def beat(self) -> None:
        for lease in self.alive:
            if lease.due <= self.time.monotonic and not lease.ended:
                lease.beat()


@pytest.fixture(scope="session")
def make_host() -> type[Host]:
    return Host


@pytest.fixture
async def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "discovery")
    host.folder().prepare()
    return host


MakeDiscovery = Callable[..., FileDiscovery]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeDiscovery]:
    """Make discovery objects on one folder, as different processes would have them."""
    made: list[FileDiscovery] = []

    def make(**settings: object) -> FileDiscovery:
        config = FileConfig.model_validate({"path": str(tmp_path / "discovery")} | settings)
        made.append(FileDiscovery(config, Metrics()))
        return made[-1]

    yield make
    for discovery in made:
        await discovery.aclose()
