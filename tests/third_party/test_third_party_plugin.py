"""A plugin of another team: made outside the tree, installed from wheels, and served.

The virtual environment is fresh. Libraries come from a folder of links into the environment of the tests, so that no
network is needed and nothing of this tree leaks in.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NEEDED = (
    "core",
    "runtime",
    "libs/generation",
    "libs/http",
    "libs/telemetry",
    "libs/text",
    "libs/testing",
    "plugins/discovery/memory",
    "plugins/frontends/openai",
    "plugins/routers/round-robin",
    "plugins/transports/inproc",
)
DYNAMO = "from dynamo_runtime.cli.main import main; main()"

# Building ten wheels and installing them takes a while on a small machine.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Installed:
    """The fresh environment and the package of the plugin."""

    folder: Path
    package: Path

    @property
    def config(self) -> Path:
        return self.package / "parrot.yaml"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTHON"))}
        return kept | {"PYTHONUNBUFFERED": "1"}

    def run(self, *command: str | Path) -> str:
        """Run a script of the environment, outside the tree, and return what it printed."""
        return _run(self.folder / "bin" / command[0], *command[1:], cwd=self.folder, env=self.environment)


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _link_libraries(folder: Path) -> None:
    """Fill `folder` with links to the installed libraries, without anything of this project."""
    folder.mkdir()
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if not item.name.startswith(("dynamo", "_editable_impl", "__editable__", "__pycache__")):
            (folder / item.name).symlink_to(item)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("third-party")
    _run(sys.executable, "-c", DYNAMO, "new", "engine", "parrot", "--path", root)
    package = root / "dynamo-plugin-engine-parrot"

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    wheels = root / "wheels"
    sources = [*(REPOSITORY / name for name in NEEDED), package]
    _run(*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, *sources)

    environment = root / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    _run(*pip, "--python", python, "install", "--no-index", "--no-deps", *sorted(wheels.iterdir()))

    libraries = root / "libraries"
    _link_libraries(libraries)
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path in a .pth file comes after the site-packages it lies in, so what is installed there wins.
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return Installed(environment, package)


@contextmanager
def serving(installed: Installed, deadline: float) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``dynamo serve`` on a free port; give its address and the process, which is ended in any case."""
    process = subprocess.Popen(
        [installed.folder / "bin" / "dynamo", "serve", installed.config, "--http-port", "0"],
        cwd=installed.folder,
        env=installed.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Ends the reading below if the server says nothing.
    watchdog = threading.Timer(deadline, process.kill)
    watchdog.start()
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"ready for requests at (http://\S+?)[\"\s]", line)
            if found:
                yield found[1], process
                return
        pytest.fail("dynamo serve ended before it was ready")
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        # Shown by pytest if the test fails.
        sys.stderr.write("".join([*said, *process.stderr]))
        process.stderr.close()
        process.wait(10)


def test_the_installed_packages_run_and_not_this_tree(installed: Installed) -> None:
    program = "import dynamo_core, dynamo_plugin_engine_parrot as p; print(dynamo_core.__file__); print(p.__file__)"

    for path in installed.run("python", "-c", program).splitlines():
        assert Path(path).is_relative_to(installed.folder)


def test_the_plugin_is_listed_as_loaded_with_its_distribution(installed: Installed) -> None:
    listed = json.loads(installed.run("dynamo", "plugins", installed.config, "--json"))

    [parrot] = [row for row in listed["plugins"] if row["kind"] == "engine"]
    assert parrot == {
        "kind": "engine",
        "name": "parrot",
        "distribution": "dynamo-plugin-engine-parrot",
        "version": "0.1.0",
        "module": "dynamo_plugin_engine_parrot",
        "loaded": True,
        "hooks": ["dynamo_register_engines"],
    }
    assert listed["problems"] == []


def test_the_plugin_keeps_the_contract_of_engines(installed: Installed) -> None:
    output = installed.run("dynamo", "conformance", "engine", "parrot", "--set", "delay=0.001")

    assert output.startswith("engine parrot (dynamo-plugin-engine-parrot 0.1.0), mode agg\n")
    assert "The engine keeps its contract: " in output


def test_the_plugin_is_served_and_answers(installed: Installed) -> None:
    body = {"model": "parrot-model", "prompt": "Hello there", "max_tokens": 5}

    with serving(installed, deadline=120) as (address, process):
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    assert code == 0
