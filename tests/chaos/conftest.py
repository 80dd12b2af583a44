"""Fleets of real processes with faulty wires between them, and the unbroken runs to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.chaos.client import Client
from tests.chaos.history import Answer, Asked
from tests.chaos.processes import Part, ProxiedWorkers, until

REFERENCE = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 0}
    grace_period: 0
"""

#: What tests have to say of how long things took.
REPORT = pytest.StashKey[list[str]]()

Fleet: TypeAlias = Callable[..., AbstractAsyncContextManager[ProxiedWorkers]]
Expect: TypeAlias = Callable[[Iterable[Asked]], Any]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[str]:
    """Return lines that are shown when all tests have ended."""
    return request.config.stash.setdefault(REPORT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Make fleets; `async with` runs one."""
    made: list[ProxiedWorkers] = []

    def make(**settings: Any) -> ProxiedWorkers:
        folder = tmp_path / f"fleet{len(made)}"
        folder.mkdir()
        made.append(ProxiedWorkers(folder, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.abandon()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server in one process, to which nothing is done."""
    config = tmp_path_factory.mktemp("reference") / "config.yaml"
    config.write_text(REFERENCE)
    part = Part(config, "--set", "frontend.port=0")
    part.start()

    async def address() -> str:
        await until(lambda: "ready for requests at " in part.log or not part.running, 60)
        assert part.running, part.log
        return part.log.split("ready for requests at ")[1].split()[0]

    try:
        yield asyncio.run(address())
        asyncio.run(part.end())
    finally:
        part.abandon()


@pytest.fixture
async def expect(reference: str) -> AsyncIterator[Expect]:
    """Yield what unbroken runs of requests say, by seed."""
    async with Client(reference) as client:

        async def answers(asked: Iterable[Asked]) -> dict[int, Answer]:
            return await client.answers(asked)

        yield answers
