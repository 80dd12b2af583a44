"""A real etcd on the loopback, on free ports, that tests may stop, kill and start anew."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.discovery import EtcdDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery.harness import see
from dynamo_testing.servers.ports import free_port
from dynamo_testing.servers.server_process import DEADLINE, ServerProcess, server_binary, starting

__all__ = ["cluster", "etcd", "etcd_binary", "make", "make_etcd", "make_on", "see"]


class Etcd(ServerProcess):
    """A member of a cluster; alone unless `members` says otherwise."""

    def __init__(
        self,
        binary: str,
        folder: Path,
        *arguments: str,
        tls_ca: Path | None = None,
        tls_client: tuple[str, str] | None = None,
        ports: tuple[int, ...] = (),
        members: tuple[int, ...] = (),
    ) -> None:
        super().__init__(folder / "etcd.log")
        self._folder = folder
        self._context = None if tls_ca is None else ssl.create_default_context(cafile=str(tls_ca))
        if self._context is not None and tls_client is not None:
            self._context.load_cert_chain(*tls_client)
        client, peer = ports or _ports(2)
        self.url = f"{'http' if tls_ca is None else 'https'}://127.0.0.1:{client}"
        peer_url = f"http://127.0.0.1:{peer}"
        cluster = ",".join(f"m{port}=http://127.0.0.1:{port}" for port in members or (peer,))
        self._command = [
            binary, "--name", f"m{peer}", "--data-dir", str(folder / "data"), "--initial-cluster", cluster,
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url,
            # The shortest life of a lease follows from these: one second.
            "--heartbeat-interval", "20", "--election-timeout", "200",
            # A login is made slow on purpose; here it only has to be one.
            "--bcrypt-cost", "4", *arguments,
        ]  # fmt: skip

    def command(self) -> Sequence[str]:
        return self._command

    def answers(self) -> bool:
        with urllib.request.urlopen(self.url + "/health", timeout=1, context=self._context) as response:
            return bool(json.load(response)["health"] == "true")

    def empty(self) -> None:
        """Remove what it held, while it does not run."""
        shutil.rmtree(self._folder / "data")

    def ask(self, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
        """Return one request, as an administrator would make it."""
        headers = {"content-type": "application/json"} | ({} if token is None else {"Authorization": token})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=DEADLINE, context=self._context) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def revision(self) -> int:
        return int(self.ask("/v3/kv/range", {"key": "YQ==", "count_only": True})["header"]["revision"])


def _ports(count: int) -> list[int]:
    first = free_port(count)
    return list(range(first, first + count))


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    return server_binary("etcd", package="etcd-server")


MakeEtcd = Callable[..., Etcd]


@pytest.fixture
def make_etcd(etcd_binary: str, tmp_path: Path) -> Iterator[MakeEtcd]:
    """Start clusters that live as long as the test."""
    with starting(tmp_path, partial(Etcd, etcd_binary)) as make:
        yield make


@pytest.fixture
def etcd(make_etcd: MakeEtcd) -> Etcd:
    return make_etcd()


@pytest.fixture
def cluster(etcd_binary: str, tmp_path: Path) -> Iterator[list[Etcd]]:
    """Yield three members: one may be lost."""
    ports = _ports(6)
    made: list[Etcd] = []
    for number in range(3):
        folder = tmp_path / f"member{number}"
        folder.mkdir()
        made.append(Etcd(etcd_binary, folder, ports=(ports[number], ports[3 + number]), members=tuple(ports[3:])))
        made[-1].launch()
    for member in made:
        member.wait()
    yield made
    for member in made:
        member.kill()


MakeDiscovery = Callable[..., EtcdDiscovery]


@pytest.fixture
async def make_on() -> AsyncIterator[MakeDiscovery]:
    """Make discovery objects, as different processes would have them."""
    made: list[EtcdDiscovery] = []

    def make(*endpoints: str, **settings: object) -> EtcdDiscovery:
        defaults = {"endpoints": endpoints, "ttl": 4.0, "heartbeat": 0.3, "poll": 0.1}
        # Time enough for an answer on a busy machine.
        defaults |= {"timeout": 2.0, "start_timeout": 5.0}
        made.append(EtcdDiscovery(EtcdConfig.model_validate(defaults | settings), Metrics()))
        return made[-1]

    yield make
    await asyncio.gather(*(discovery.aclose() for discovery in made))


@pytest.fixture
def make(etcd: Etcd, make_on: MakeDiscovery) -> MakeDiscovery:
    """Return the same, on one cluster."""
    return lambda **settings: make_on(etcd.url, **settings)
