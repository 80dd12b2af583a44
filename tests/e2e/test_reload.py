"""Settings that change while real processes serve: no request fails, no permit is lost, no connection breaks."""

from __future__ import annotations

import http.client
import json
import os
import pty
import random
import re
import signal
import ssl
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dynamo_http.auth import hash_of
from dynamo_testing.servers.certificates import make_certificates

TOKEN = "operators-token-of-the-test"
STAYS, *OTHERS = (f"dyn-key-number-{number}-of-the-test" for number in range(4))
CONFIG = """
frontend: {{processes: {processes}, tls: {{cert: {folder}/tls.crt, key: {folder}/tls.key}}}}
admin: {{token: "${{file:{folder}/token}}"}}
auth: {{keys: [{keys}]}}
router: {{use: kv, temperature: {temperature}}}
admission: {{use: fair-queue, requests_per_worker: 4, tenants: {{default: {{weight: {weight}}}}}}}
log: {{level: {level}}}
client: {{drain_grace: 0, retries: {retries}}}
transport: {{use: tcp}}
discovery: {{use: file, path: {folder}/discovery}}
workers:
  mock:
    model: {{name: mock-model}}
    engine: {{use: mocker, speedup_ratio: 20}}
    replicas: {replicas}
    grace_period: 0
"""
PARTS: dict[str, Any] = {
    "processes": 2, "replicas": 2, "keys": (STAYS, OTHERS[0]), "temperature": 0.5, "weight": 1.0, "level": "info",
    "retries": 2,
}  # fmt: skip
ASKED = {"model": "mock-model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


class Site:
    """A server of several processes, its files, and its operators."""

    def __init__(self, folder: Path, serve: Any, *options: str, **parts: Any) -> None:
        self.folder = folder
        self.parts: dict[str, Any] = PARTS | parts
        self.renew()
        (folder / "token").write_text(TOKEN)
        self.server = serve(self.text(), *options)
        self.config = Path(self.server.process.args[4])
        assert self.server.until(lambda: self.server.log.count("ready for requests") == 2, 20), self.server.log

    @property
    def admins(self) -> list[int]:
        """The ports of the frontends for operators, by their numbers; one that starts again has another."""
        ports = re.findall(r"\[frontend-(\d)\].* of this process are at http://127\.0\.0\.1:(\d+)", self.server.log)
        return [int(port) for _, port in sorted(dict(ports).items())]

    def text(self, **parts: Any) -> str:
        self.parts |= parts
        keys = ", ".join(f"{{id: k{key[15]}, hash: '{hash_of(key)}'}}" for key in self.parts["keys"])
        return CONFIG.format(**(self.parts | {"keys": keys, "folder": self.folder}))

    def write(self, **parts: Any) -> None:
        # As editors and mounts do it: the file is never there by half.
        new = self.config.with_suffix(".new")
        new.write_text(self.text(**parts))
        os.replace(new, self.config)

    def renew(self) -> None:
        """Write a new certificate of a new authority."""
        make_certificates(self.folder, tls="IP:127.0.0.1")
        self.trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

    def reload(self, *, frontend: int = 0, query: str = "", **parts: Any) -> tuple[int, Any]:
        self.write(**parts)
        return self.operator("POST", f"/admin/reload{query}", frontend)

    def operator(self, method: str, path: str, frontend: int = 0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admins[frontend], timeout=60)
        try:
            connection.request(method, path, headers={"authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body.startswith(b"{") else body.decode()
        finally:
            connection.close()

    def answers(self, frontend: int) -> bool:
        try:
            return self.operator("GET", "/metrics", frontend)[0] == 200
        except OSError:
            return False

    def status(self, key: str) -> int:
        """Return that of the model list, on a new connection; new ones go to either frontend."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=30, context=self.trust)
        try:
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            return connection.getresponse().status
        finally:
            connection.close()

    def held(self) -> float:
        """Return requests that the admission of any frontend counts as running or waiting."""
        names = "dynamo_admission_running_requests", "dynamo_admission_queue_requests"
        pattern = re.compile(rf"^(?:{'|'.join(names)})(?:\{{.*\}})? (\S+)$", re.MULTILINE)
        texts = (self.operator("GET", "/metrics", number)[1] for number in range(len(self.admins)))
        return sum(float(value) for text in texts for value in pattern.findall(text))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, serve_for_module: Any) -> Site:
    return Site(tmp_path_factory.mktemp("site"), lambda config: serve_for_module(config))


@pytest.fixture
def site(shared: Site) -> Site:
    """Return a site as it begins, and all of its processes there."""
    assert shared.server.until(lambda: shared.reload(**PARTS)[0] == 200, 20)
    assert shared.server.until(lambda: "absent" not in str(shared.reload()[1]["processes"]), 20)
    assert shared.server.until(lambda: all(shared.answers(number) for number in (0, 1)), 20)
    return shared


class Client(threading.Thread):
    """Asks over one connection until it is stopped, and notes every status, and what broke."""

    def __init__(self, site: Site, number: int) -> None:
        super().__init__(daemon=True)
        self.port = site.server.port
        self.connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=site.trust)
        self.connection.connect()
        self.socket = self.connection.sock
        self.streams = bool(number % 2)
        self.statuses: Counter[int] = Counter()
        self.broken = ""
        self.enough = threading.Event()

    def run(self) -> None:
        headers = {"authorization": f"Bearer {STAYS}", "content-type": "application/json"}
        try:
            while not self.enough.is_set():
                body = json.dumps(ASKED | {"stream": self.streams})
                self.connection.request("POST", "/v1/chat/completions", body, headers)
                answer = self.connection.getresponse()
                data = answer.read()
                whole = b"[DONE]" in data if self.streams else b'"choices"' in data
                self.statuses[answer.status if whole else 0] += 1
                if self.connection.sock is not self.socket:
                    raise ConnectionError("the server closed the connection")
        except Exception as error:
            self.broken = repr(error)
        finally:
            self.connection.close()


def load(site: Site, count: int) -> list[Client]:
    clients = [Client(site, number) for number in range(count)]
    for client in clients:
        client.start()
    return clients


def stop(clients: list[Client]) -> Counter[int]:
    for client in clients:
        client.enough.set()
    total: Counter[int] = Counter()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
        assert client.broken == ""
        total += client.statuses
    return total


def many_reloads(site: Site, rounds: int) -> None:
    """Reload under load; every tenth file is wrong, every seventh needs a restart."""
    choice = random.Random(19)
    clients = load(site, 6)
    assert site.server.until(lambda: site.held() > 0, 10)
    for number in range(1, rounds + 1):
        keys = [STAYS, *choice.sample(OTHERS, choice.randint(0, 2))]
        parts: dict[str, Any] = {"keys": keys, "temperature": choice.random(), "weight": choice.uniform(0.5, 5)}
        before = list(site.parts["keys"])
        good = dict(site.parts)
        frontend = number % 2
        if number % 10 == 0:
            status, _ = site.reload(frontend=frontend, **parts, level="loud")
            assert status == 422
            site.parts = good
            expected = before
        elif number % 7 == 0:
            status, report = site.reload(frontend=frontend, **parts, replicas=3, retries=5)
            assert (status, report["status"]) == (409, "refused")
            assert [row["key"] for row in report["changes"] if not row["live"]] == [
                "client.retries", "workers.mock.replicas"
            ]  # fmt: skip
            site.parts = good
            expected = before
        else:
            if number % 5 == 0:
                site.renew()
            status, report = site.reload(frontend=frontend, **parts)
            assert (status, report["status"]) == (200, "applied"), report
            assert {row["result"] for row in report["processes"]} <= {"applied", "unchanged"}
            expected = keys
        for key in (STAYS, *OTHERS):
            for _ in range(2):
                assert site.status(key) == (200 if key in expected else 401), (number, key, expected)
    statuses = stop(clients)
    assert set(statuses) == {200}
    assert statuses[200] > rounds
    assert site.server.until(lambda: site.held() == 0, 10)


def test_a_reload_reaches_every_process_whichever_frontend_is_asked(site: Site) -> None:
    assert (site.status(OTHERS[0]), site.status(OTHERS[1])) == (200, 401)

    for frontend in (0, 1):
        status, report = site.reload(frontend=frontend, keys=(STAYS, OTHERS[1 - frontend]), level="debug")

        assert (status, report["status"]) == (200, "applied")
        assert sorted(row["name"] for row in report["processes"]) == [
            "frontend-0", "frontend-1", "supervisor", "workers.mock-0", "workers.mock-1"
        ]  # fmt: skip
        assert [site.status(OTHERS[1 - frontend]) for _ in range(6)] == [200] * 6
        assert [site.status(OTHERS[frontend]) for _ in range(6)] == [401] * 6


def test_ten_reloads_under_load_fail_no_request(site: Site) -> None:
    many_reloads(site, 10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_hundred_reloads_under_load(site: Site) -> None:
    many_reloads(site, 100)


@pytest.mark.timeout(300)
def test_a_watched_file_is_read_when_its_mount_changes_and_a_hang_up_reads_it_too(serve: Any, tmp_path: Path) -> None:
    site = Site(tmp_path, serve, "--set", "reload=watch", replicas=1)

    site.write(keys=(STAYS, OTHERS[2]))
    assert site.server.until(lambda: site.status(OTHERS[2]) == 200, 20)
    assert site.server.until(lambda: [site.status(OTHERS[0]) for _ in range(6)] == [401] * 6, 5)

    site.write(keys=(STAYS,))
    site.server.signal(signal.SIGHUP)
    assert site.server.until(lambda: [site.status(OTHERS[2]) for _ in range(6)] == [401] * 6, 10)
    assert site.server.process.poll() is None


def test_sighup_on_a_terminal_ends_the_server(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("frontend: {port: 0}\nworkers: {mock: {model: {name: m}, engine: {use: mocker}}}\n")
    pid, terminal = pty.fork()
    if pid == 0:
        # As in a shell: what runs the tests may have the signal ignored, which children inherit.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(config)])
    shown = b""
    while b"ready for requests" not in shown:
        shown += os.read(terminal, 65536)

    os.kill(pid, signal.SIGHUP)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP
    os.close(terminal)
