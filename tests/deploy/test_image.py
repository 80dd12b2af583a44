"""The Dockerfile, as far as it can be tested where nothing builds images: its lint, what it names, its commands."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
DOCKERFILES = ["Dockerfile", "examples/mocker/etcd.Dockerfile"]
TEXT = (REPOSITORY / "Dockerfile").read_text()
HEALTHCHECK = REPOSITORY / "deploy" / "image" / "healthcheck.py"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return every instruction and its arguments, with continued lines joined and comments gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def arguments() -> dict[str, str]:
    """Return the build arguments and their defaults."""
    pairs = (rest.partition("=") for word, rest in instructions(TEXT) if word == "ARG")
    return {name: value.strip('"') for name, _, value in pairs}


def last(word: str) -> str:
    """Return the argument of the last instruction of a name: what counts."""
    return [rest for found, rest in instructions(TEXT) if found == word][-1]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing(name: str) -> None:
    # Installed beside the interpreter, which need not be the first on the path.
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("NOT TESTED: there is no hadolint; see requirements-dev.txt")

    result = subprocess.run(
        [found, "--no-color", "--failure-threshold", "warning", name],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=90,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout


def test_the_image_installs_existing_distributions() -> None:
    for plugin in arguments()["PLUGINS"].split():
        folder, _, extras = plugin.rstrip("]").partition("[")
        manifest = tomllib.loads((REPOSITORY / "plugins" / folder / "pyproject.toml").read_text())["project"]
        offered = manifest.get("optional-dependencies", {})
        assert all(extra in offered for extra in extras.split(",") if extra), plugin
    for lib in arguments()["LIBS"].split():
        assert (REPOSITORY / "libs" / lib / "pyproject.toml").exists(), lib
    runtime = tomllib.loads((REPOSITORY / "runtime" / "pyproject.toml").read_text())["project"]
    assert set(arguments()["EXTRAS"].split(",")) <= runtime["optional-dependencies"].keys()


def test_copied_paths_exist_and_the_build_context_has_no_others() -> None:
    patterns = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert patterns[0] == "*"
    admitted = {line.removeprefix("!") for line in patterns if line.startswith("!")}

    sources = [rest.split()[0] for word, rest in instructions(TEXT) if word == "COPY" and "--from" not in rest]

    assert sources
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert any(source == path or source.startswith(f"{path}/") for path in admitted), source
        assert not any(fnmatch.fnmatch(f"/{source}", line) for line in patterns if line.startswith("**"))
    assert admitted <= {*sources, *(str(Path(source).parent) for source in sources)}


def test_the_image_runs_unprivileged_with_a_health_check() -> None:
    user, _, group = last("USER").partition(":")

    # In numbers, so that a cluster can see that it is not root.
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(last("ENTRYPOINT")) == ["dynamo"]
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert check[0] == "python"
    assert f"COPY deploy/image/healthcheck.py {check[1]}" in TEXT
    config = yaml.safe_load((REPOSITORY / "examples" / "mocker" / "dynamo.yaml").read_text())
    assert check[2:] == [
        f"http://127.0.0.1:{config['frontend']['port']}/ready",
        f"http://127.0.0.1:{config['workers']['mock']['system_port']}/health",
    ]


def test_the_final_image_has_no_build_tools() -> None:
    stages = TEXT.split("\nFROM ")
    assert len(stages) == 3
    # Sources, pip and its caches stay in the first stage; the second has the finished environment only.
    assert " pip " not in stages[2]
    assert "apt-get" not in stages[2]
    assert "--no-cache-dir" in stages[1]


class _Answers(BaseHTTPRequestHandler):
    """200 for /good, 503 for everything else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(5)


@pytest.mark.parametrize(
    ("paths", "code"),
    [(["/good"], 0), (["/bad"], 1), (["/bad", "/good"], 0), (["closed", "/good"], 0), (["closed"], 1), ([], 1)],
)
def test_the_health_check_is_content_with_one_good_answer(address: str, paths: list[str], code: int) -> None:
    urls = ["http://127.0.0.1:1/" if path == "closed" else address + path for path in paths]
    # A proxy of the environment has no part in it.
    environment = {"http_proxy": "http://127.0.0.1:1"}

    result = subprocess.run([sys.executable, str(HEALTHCHECK), *urls], env=environment, capture_output=True, timeout=90)

    assert (result.returncode, result.stderr) == (code, b"")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_dockerfile_installs_an_environment_that_accepts_the_example_configs(
    tmp_path: Path, example: Callable[[str], dict[str, Any]], chart: Callable[..., list[dict[str, Any]]]
) -> None:
    """The command itself, with the folder of this test in place of /opt. It asks the index that pip is set up for."""
    for folder in ("core", "runtime", "libs", "plugins"):
        shutil.copytree(
            REPOSITORY / folder, tmp_path / folder,
            ignore=shutil.ignore_patterns("tests", "__pycache__", "*.egg-info", ".*_cache"),
        )  # fmt: skip
    [command] = [rest for word, rest in instructions(TEXT) if word == "RUN" and "pip" in rest]
    command = re.sub(r"--mount=\S+ ", "", command).replace("/opt/dynamo", str(tmp_path / "opt"))
    command = re.sub(r"(?<=[&\s])python ", f"{sys.executable} ", f" {command}")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=_plain() | arguments(), check=True, timeout=500)

    dynamo = str(tmp_path / "opt" / "bin" / "dynamo")
    configs = {"compose.yaml": (REPOSITORY / "examples" / "mocker" / "dynamo.yaml").read_text()}
    for name in ("mocker", "nats-etcd"):
        [found] = [found for found in chart(example(name)) if found["kind"] == "ConfigMap"]
        configs[f"{name}.yaml"] = found["data"]["dynamo.yaml"]
    for name, text in configs.items():
        path = tmp_path / name
        secret = tmp_path / "secret"
        secret.write_text("0123456789abcdef")
        path.write_text(text.replace("/var/lib/dynamo/secret", str(secret)))
        variables = dict.fromkeys(re.findall(r"\$\{env:([^}]+)\}", text), "0123456789abcdef") | {"POD_IP": "127.0.0.1"}
        for profile in yaml.safe_load(text).get("profiles", {"": None}):
            options = ["--profile", profile] if profile else []
            result = subprocess.run(
                [dynamo, "check", str(path), *options],
                env=_plain() | variables, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr


def _plain() -> dict[str, str]:
    """Return what a build has of the environment, and where this machine's pip finds its index."""
    return {key: value for key, value in os.environ.items() if key in ("PATH", "HOME") or key.startswith("PIP_")}
