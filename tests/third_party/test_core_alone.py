"""Core in an environment of its own: what it brings, and what can be had of it there."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CORE = Path(__file__).parents[2] / "core" / "src"
#: What no engine needs.
HEAVY = ("aiohttp", "click", "opentelemetry", "prometheus_client", "xxhash", "yaml")

EVERY_NAME = f"""
import sys
import dynamo_core
for name in dynamo_core.__all__:
    assert getattr(dynamo_core, name) is not None
print(*sorted(name for name in {HEAVY!r} if name in sys.modules))
"""

ENGINE = """
import asyncio
from dynamo_core import EngineConfig, GenerateContext, LLMEngine, LLMEngineOutput
from dynamo_core import PluginConfig, PreprocessedRequest, WorkerConfig

class Echo(LLMEngine):
    NAME = "echo"

    async def start(self, worker_id):
        return EngineConfig(model="echo")

    async def generate(self, request, ctx):
        for token in request.token_ids:
            yield LLMEngineOutput([token])
        yield LLMEngineOutput.stop()

    async def cleanup(self):
        pass

async def main():
    engine = Echo(PluginConfig(), WorkerConfig(model_name="echo"))
    await engine.start(1)
    request = PreprocessedRequest(model="echo", token_ids=[1, 2, 3])
    answer = [item async for item in engine.generate(request, GenerateContext("r"))]
    print([item.token_ids for item in answer[:-1]], answer[-1].finish_reason)

asyncio.run(main())
"""


def brought(name: str, found: set[str] | None = None) -> set[str]:
    """Return the distributions that an installation of this one brings, without extras."""
    found = set() if found is None else found
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(requirement.name)
            brought(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of links to core and the distributions that it brings."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "dynamo_core").symlink_to(CORE / "dynamo_core")
    for name in brought("dynamo-core"):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def run(folder: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_core_brings_at_most_nine_distributions() -> None:
    assert len(brought("dynamo-core")) <= 9, brought("dynamo-core")


def test_every_public_name_of_core_imports_with_core_alone(alone: Path) -> None:
    assert run(alone, EVERY_NAME) == ""


def test_an_engine_needs_nothing_but_core(alone: Path) -> None:
    assert run(alone, ENGINE) == "[[1], [2], [3]] stop"
