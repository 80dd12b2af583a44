"""`examples/mocker`: what the containers of its compose files run, run as processes on the loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import Stream, answer

REPOSITORY = Path(__file__).parents[2]
STACK = REPOSITORY / "examples" / "mocker"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
SERVERS = "docker-compose.yml"
NO_SERVERS = "docker-compose.tcp.yml"

#: What differs because there is only one host here.
LOOPBACK = {
    "DYN_FRONTEND__HOST": "127.0.0.1",
    "DYN_WORKERS__MOCK__SYSTEM_PORT": "0",
    # And nobody is late when it ends.
    "DYN_WORKERS__MOCK__GRACE_PERIOD": "0",
    "DYN_CLIENT__DRAIN_GRACE": "0",
}


class Stack:
    """The services of a compose file, with every path of the containers below one folder, and ports that are free."""

    def __init__(self, file: str, folder: Path) -> None:
        self.folder = folder
        (folder / "lib").mkdir(mode=0o700)
        (folder / "etc").mkdir()
        ports = {port: str(free_port()) for port in ("4222", "8222", "2379")}
        self._moves = {
            "/etc/dynamo": str(folder / "etc"),
            "/var/lib/dynamo": str(folder / "lib"),
            "/var/lib/etcd": str(folder / "etcd"),
            **{f"{host}:{port}": f"127.0.0.1:{ports[port]}" for host, port in (("nats", "4222"), ("etcd", "2379"))},
            **{f"0.0.0.0:{port}": f"127.0.0.1:{ports[port]}" for port in ports},
            **{f"127.0.0.1:{port}": f"127.0.0.1:{ports[port]}" for port in ports},
            **{f'"{port}"': f'"{ports[port]}"' for port in ports},
            "--addr, 0.0.0.0": "--addr, 127.0.0.1",
            '"0.0.0.0:7100"': '"127.0.0.1:0"',
        }
        self.services: dict[str, Any] = yaml.safe_load(self._moved(file))["services"]
        (folder / "etc" / "dynamo.yaml").write_text(self._moved("dynamo.yaml"))

    def _moved(self, name: str) -> str:
        text = (STACK / name).read_text()
        # Of a bind mount the file's own side stays; the other is where it has been put.
        for there, here in self._moves.items():
            text = text.replace(there, here)
        return text

    def environment(self, service: str) -> dict[str, str]:
        """Return what a container of a service has as its environment."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        own: dict[str, str] = self.services[service].get("environment", {})
        return kept | own | LOOPBACK | {"XDG_CACHE_HOME": str(self.folder / "cache")}

    def command(self, service: str) -> list[str]:
        """Return what runs in the container of a service, with this interpreter."""
        own = self.services[service]
        entrypoint = own.get("entrypoint") or {
            "nats": ["nats-server"],
            "etcd": json.loads(re.findall(r"^ENTRYPOINT (.*)$", (STACK / "etcd.Dockerfile").read_text(), re.M)[0]),
        }.get(service, json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[0]))
        program, *arguments = [str(word) for word in [*entrypoint, *own["command"]]]
        programs = {"python": [sys.executable], "dynamo": [sys.executable, "-m", "dynamo_runtime.cli.main"]}
        return [*programs.get(program, [program]), *arguments]


class Processes:
    """What a test has started; all of it is ended with the test."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, stack: Stack, service: str) -> subprocess.Popen[bytes]:
        with (stack.folder / f"{service}{len(self._all)}.log").open("ab") as log:
            process = subprocess.Popen(
                stack.command(service), env=stack.environment(service), stdout=log, stderr=log, cwd=stack.folder
            )
        self._all.append(process)
        return process

    def end(self) -> list[int]:
        """Return the exit codes of those that still ran, the last one first."""
        running = [process for process in reversed(self._all) if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        return [process.returncode for process in running]


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture
def servers(tmp_path: Path, processes: Processes) -> Stack:
    """Return the stack of NATS and etcd, with both running and as healthy as their own checks want them."""
    for binary, package in (("nats-server", "nats-server"), ("etcd", "etcd-server")):
        if shutil.which(binary) is None:
            missing = f"NOT TESTED: there is no {binary}; install one (Debian: {package})"
            if os.environ.get("CI") == "1":
                pytest.fail(missing)
            pytest.skip(missing)
    stack = Stack(SERVERS, tmp_path)
    for service in ("nats", "etcd"):
        processes.start(stack, service)
    # What wget and etcdctl ask in the containers.
    monitoring = stack.services["nats"]["healthcheck"]["test"][-1]
    client = next(word for word in stack.services["etcd"]["healthcheck"]["test"] if "--endpoints=" in word)
    for url in (monitoring, client.partition("=")[2] + "/health"):
        assert _answers(url, 60), f"{url} does not answer"
    return stack


@pytest.fixture(scope="module")
def no_servers(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Return the stack over tcp and a folder, with its secret made."""
    stack = Stack(NO_SERVERS, tmp_path_factory.mktemp("stack"))
    subprocess.run(stack.command("secret"), check=True, timeout=90)
    return stack


def _answers(url: str, seconds: float) -> bool:
    """Return whether GET is answered with 200 within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            time.sleep(0.05)
    return False


def _start(stack: Stack, processes: Processes, serve: Any) -> tuple[Any, list[subprocess.Popen[bytes]]]:
    """Return the frontend, and the workers of the stack, as many as it says, once the frontend sees them."""
    workers = [
        processes.start(stack, "worker") for _ in range(stack.services["worker"].get("deploy", {}).get("replicas", 1))
    ]
    [*_, kind, config] = stack.command("frontend")
    frontend = serve(None, config, command=kind, env=stack.environment("frontend"))
    assert frontend.until(lambda: len(frontend.instances()) == len(workers) == 2, 20), frontend.log
    return frontend, workers


def test_the_stack_answers_whole_although_a_worker_is_killed_and_ends_in_order(
    servers: Stack, processes: Processes, serve: Any
) -> None:
    frontend, workers = _start(servers, processes, serve)
    # About three seconds, on either worker.
    body = {"stream_options": {"include_usage": True}, "max_tokens": 300}
    streams = [Stream(frontend, **body) for _ in range(2)]
    for stream in streams:
        stream.begun()

    workers[0].kill()

    ended = [stream.rest() for stream in streams]
    assert all(b"data: [DONE]" in text for text in ended), frontend.log
    assert all(b'"completion_tokens":300' in text.replace(b" ", b"") for text in ended), ended
    # One of the two was on it, and went on elsewhere.
    assert frontend.until(lambda: frontend.metric("dynamo_frontend_model_migration_total") >= 1, 5)
    # Compose starts it again; here the test does.
    pids = {workers[1].pid, processes.start(servers, "worker").pid}
    assert frontend.until(lambda: pids <= set(frontend.instances().values()), 30), frontend.log
    assert [answer(frontend, max_tokens=8)["usage"]["completion_tokens"] for _ in range(4)] == [8] * 4

    frontend.signal(signal.SIGTERM)

    assert frontend.wait() == 0
    # Workers, etcd, NATS: the first two with 0; the servers have codes of their own.
    assert processes.end()[:2] == [0, 0]


def test_the_stack_without_servers_answers(no_servers: Stack, processes: Processes, serve: Any) -> None:
    frontend, _ = _start(no_servers, processes, serve)

    assert [answer(frontend, max_tokens=8)["usage"]["completion_tokens"] for _ in range(4)] == [8] * 4


def test_the_secret_is_made_once_and_for_the_owner_only(no_servers: Stack) -> None:
    file = no_servers.folder / "lib" / "secret"
    made = file.read_text()

    subprocess.run(no_servers.command("secret"), check=True, timeout=90)

    assert file.read_text() == made
    assert len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("file", [SERVERS, NO_SERVERS])
def test_services_depend_on_healthy_ones_and_have_a_stop_grace(file: str) -> None:
    compose = yaml.safe_load((STACK / file).read_text())
    services = compose["services"]
    parts = {name: service for name, service in services.items() if name in ("frontend", "worker")}
    others = {name: service for name, service in services.items() if name not in parts}

    assert len(parts) == 2
    for service in parts.values():
        ready = "service_healthy" if file == SERVERS else "service_completed_successfully"
        assert service["depends_on"] == {name: {"condition": ready} for name in others}
        # A worker has 5 + 30 seconds, and so has a frontend.
        assert int(service["stop_grace_period"].removesuffix("s")) > 35
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
    # Only the API leaves the stack, and only for this host.
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"frontend": ["127.0.0.1:8000:8000"]}


def test_the_image_has_the_configured_plugins() -> None:
    config = yaml.safe_load((STACK / "dynamo.yaml").read_text())
    used = {
        f"engine-{config['workers']['mock']['engine']['use']}",
        f"frontend-{config['frontend']['use']}",
        f"router-{config['router']['use']}",
        *(f"{part}-{profile[part]['use']}" for profile in config["profiles"].values() for part in profile),
    }
    [plugins] = re.findall(r'^ARG PLUGINS="(.*)"$', DOCKERFILE, re.M)
    [libs] = re.findall(r'^ARG LIBS="(.*)"$', DOCKERFILE, re.M)
    folders = [
        "core",
        "runtime",
        *(f"libs/{name}" for name in libs.split()),
        *(f"plugins/{path.split('[')[0]}" for path in plugins.split()),
    ]
    manifests = [tomllib.loads((REPOSITORY / path / "pyproject.toml").read_text())["project"] for path in folders]
    names = {manifest["name"] for manifest in manifests}

    assert used <= {name for manifest in manifests for name in manifest.get("entry-points", {}).get("dynamo", {})}
    for manifest in manifests:
        needed = {re.split(r"[\[~>=<]", text)[0] for text in manifest["dependencies"]}
        assert {name for name in needed if name.startswith("dynamo-")} <= names
        # Neither weights nor accelerators nor the frameworks for them.
        assert not needed & {"torch", "transformers", "vllm", "tensorflow", "jax"}
