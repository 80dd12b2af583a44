"""A real etcd on the loopback, on free ports, that tests may stop, kill and start anew."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.telemetry import Metrics
from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.discovery import EtcdDiscovery
from dynamo_testing.discovery.harness import see
from dynamo_testing.ports import free_port

__all__ = ["cluster", "etcd", "etcd_binary", "make", "make_etcd", "make_on", "see"]

DEADLINE = 15.0


class Etcd:
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
        self._log = folder / "etcd.log"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *, empty: bool = False) -> None:
        """Starts it with what it held, or empty."""
        if empty:
            shutil.rmtree(self._folder / "data")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def start(self, *, empty: bool = False) -> None:
        """Starts it, and returns when it serves."""
        self.launch(empty=empty)
        self.wait()

    def wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + DEADLINE
        while not self._healthy():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        """It is there and does not answer, until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)
            self.process = None

    def ask(self, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
        """One request, as an administrator would make it."""
        headers = {"content-type": "application/json"} | ({} if token is None else {"Authorization": token})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=DEADLINE, context=self._context) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def revision(self) -> int:
        return int(self.ask("/v3/kv/range", {"key": "YQ==", "count_only": True})["header"]["revision"])

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=1, context=self._context) as response:
                return bool(json.load(response)["health"] == "true")
        except OSError:
            return False


def _ports(count: int) -> list[int]:
    first = free_port(count)
    return list(range(first, first + count))


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    found = shutil.which("etcd")
    if found is None:
        missing = "NOT TESTED: there is no etcd; install one (Debian: etcd-server), 3.4 or newer"
        if os.environ.get("CI") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


MakeEtcd = Callable[..., Etcd]


@pytest.fixture
def make_etcd(etcd_binary: str, tmp_path: Path) -> Iterator[MakeEtcd]:
    """Starts clusters that live as long as the test."""
    made: list[Etcd] = []

    def make(*arguments: str, **how: Any) -> Etcd:
        folder = tmp_path / f"etcd{len(made)}"
        folder.mkdir()
        made.append(Etcd(etcd_binary, folder, *arguments, **how))
        made[-1].start()
        return made[-1]

    yield make
    for etcd in made:
        etcd.kill()


@pytest.fixture
def etcd(make_etcd: MakeEtcd) -> Etcd:
    return make_etcd()


@pytest.fixture
def cluster(etcd_binary: str, tmp_path: Path) -> Iterator[list[Etcd]]:
    """Three members: one may be lost."""
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
    """Makes discovery objects, as different processes would have them."""
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
    """The same, on one cluster."""
    return lambda **settings: make_on(etcd.url, **settings)
