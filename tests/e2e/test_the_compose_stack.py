"""`deploy/mocker`: what its containers run, run as processes, in a folder in place of the volume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
STACK = REPOSITORY / "deploy" / "mocker"
DOCKERFILE = (STACK / "Dockerfile").read_text()

#: The addresses of the containers, as there is only one host here.
LOOPBACK = {
    "DYN_FRONTEND__HOST": "127.0.0.1",
    "DYN_TRANSPORT__BIND": "127.0.0.1:0",
    "DYN_WORKERS__MOCK__SYSTEM_PORT": "0",
    # And nobody is late when it ends.
    "DYN_WORKERS__MOCK__GRACE_PERIOD": "0",
    "DYN_CLIENT__DRAIN_GRACE": "0",
}


class Stack:
    """The services of the compose file, with every path of the containers below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "lib").mkdir(mode=0o700)
        self.services: dict[str, Any] = yaml.safe_load(self._moved("compose.yaml"))["services"]
        config = folder / "etc" / "dynamo.yaml"
        config.parent.mkdir()
        config.write_text(self._moved("dynamo.yaml"))
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | LOOPBACK
        self.environment["XDG_CACHE_HOME"] = str(folder / "cache")

    def _moved(self, name: str) -> str:
        text = (STACK / name).read_text()
        return text.replace("/var/lib/dynamo", str(self.folder / "lib")).replace(
            "/etc/dynamo", str(self.folder / "etc")
        )

    def command(self, service: str) -> list[str]:
        """What runs in the container of a service, with this interpreter."""
        own = self.services[service]
        entrypoint = own.get("entrypoint") or json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[0])
        program, *arguments = [str(word) for word in [*entrypoint, *own["command"]]]
        programs = {"python": [sys.executable], "dynamo": [sys.executable, "-m", "dynamo_core.cli.main"]}
        return [*programs[program], *arguments]


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


@pytest.fixture
def workers(stack: Stack) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers of the stack, as many as it says; ended with the test."""
    subprocess.run(stack.command("secret"), check=True, timeout=20)
    count = stack.services["worker"]["deploy"]["replicas"]
    processes = [
        subprocess.Popen(stack.command("worker"), env=stack.environment, stderr=subprocess.DEVNULL)
        for _ in range(count)
    ]
    yield processes
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def test_the_stack_answers(stack: Stack, workers: list[subprocess.Popen[bytes]], serve: Any) -> None:
    [*_, kind, config] = stack.command("frontend")
    frontend = serve(None, config, command=kind, env=stack.environment)
    assert frontend.until(lambda: len(frontend.instances()) == len(workers) == 2, 15)

    body = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answers = [frontend.request("POST", "/v1/chat/completions", body) for _ in range(4)]

    assert [status for status, _, _ in answers] == [200] * 4
    assert {json.loads(data)["usage"]["completion_tokens"] for _, _, data in answers} == {8}


def test_the_secret_is_made_once_and_for_the_owner_only(stack: Stack) -> None:
    file = stack.folder / "lib" / "secret"
    made = []
    for _ in range(2):
        subprocess.run(stack.command("secret"), check=True, timeout=20)
        made.append(file.read_text())

    assert made[0] == made[1]
    assert len(made[0]) == 64
    assert file.stat().st_mode & 0o777 == 0o600


def test_every_service_waits_for_the_secret_and_has_time_to_stop() -> None:
    compose = yaml.safe_load((STACK / "compose.yaml").read_text())

    for name in ("frontend", "worker"):
        service = compose["services"][name]
        assert service["depends_on"] == {"secret": {"condition": "service_completed_successfully"}}
        assert service["stop_grace_period"] == "60s"
        assert service["volumes"] == compose["services"]["secret"]["volumes"]
    assert compose["volumes"] == {"shared": None}


def test_the_image_has_what_the_config_names_and_what_that_needs() -> None:
    config = yaml.safe_load((STACK / "dynamo.yaml").read_text())
    used = {
        f"engine-{config['workers']['mock']['engine']['use']}",
        *(f"{part}-{config[part]['use']}" for part in ("frontend", "transport", "discovery")),
        "router-round-robin",
    }
    installed = [path.split("[")[0] for path in re.findall(r'^ +"?\./([^\s"]+)', DOCKERFILE, re.M)]
    manifests = [tomllib.loads((REPOSITORY / path / "pyproject.toml").read_text())["project"] for path in installed]
    names = {manifest["name"] for manifest in manifests}

    assert used <= {name for manifest in manifests for name in manifest.get("entry-points", {}).get("dynamo", {})}
    for manifest in manifests:
        needed = {re.split(r"[\[~>=<]", text)[0] for text in manifest["dependencies"]}
        assert {name for name in needed if name.startswith("dynamo-")} <= names
