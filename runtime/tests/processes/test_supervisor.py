"""When the supervisor starts a part again, when it gives up, and how it ends parts that are still starting."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dynamo_runtime.processes import supervisor as module
from dynamo_runtime.processes.control import READY, VARIABLE
from dynamo_runtime.processes.supervisor import Part, Supervisor, serve_command

#: A part as its supervisor sees it: it says that it serves, waits for its end, or exits.
SERVE = f"import os; os.write(int(os.environ[{VARIABLE!r}]), {READY!r}); "
COUNT = "import pathlib, sys; lives = pathlib.Path(sys.argv[1]); lives.open('a').write('x'); "
UNTIL_TOLD = "os.read(int(os.environ['DYN_SUPERVISOR_FD']), 1); "

Make = Callable[..., Supervisor]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    made: list[Supervisor] = []

    def start(program: str, patience: float = 20.0) -> Supervisor:
        # A machine so slow that every life of a part takes a minute.
        clock = itertools.count(0.0, 60.0)
        parts = [Part("workers.mock", 0)]
        command = [sys.executable, "-c", COUNT + program, str(tmp_path / "lives")]
        made.append(Supervisor(parts, command, lambda part: patience, clock=lambda: next(clock)))
        return made[-1]

    yield start
    for supervisor in made:
        await supervisor.stop(hurried=True)


async def lives(tmp_path: Path, count: int) -> None:
    """Return once a part has begun that many lives."""

    def wait() -> None:
        deadline = time.monotonic() + 20
        while not path.exists() or len(path.read_text()) < count:
            assert time.monotonic() < deadline, "the part was not started"
            time.sleep(0.01)

    path = tmp_path / "lives"
    await asyncio.to_thread(wait)


async def test_a_part_that_never_served_and_cannot_run_ends_the_whole_however_long_it_took(make: Make) -> None:
    supervisor = make("sys.exit(2)")

    await supervisor.start()

    async with asyncio.timeout(20):
        assert await supervisor.failed() == "workers.mock-0 cannot run with this config: it said no more"


async def test_a_part_that_has_served_is_started_again_although_its_config_is_wrong_now(
    make: Make, tmp_path: Path
) -> None:
    supervisor = make(f"{SERVE} sys.exit(2)")

    await supervisor.start()

    await lives(tmp_path, 3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await supervisor.failed()


async def test_a_part_that_never_served_and_failed_otherwise_is_tried_again(make: Make, tmp_path: Path) -> None:
    supervisor = make("sys.exit(1)")

    await supervisor.start()

    await lives(tmp_path, 3)


async def test_ctrl_c_gives_up_a_starting_part_soon_and_names_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "START_ENDS", 0.2)
    supervisor = make("import time; time.sleep(600)")
    await supervisor.start()
    await lives(tmp_path, 1)

    with caplog.at_level("INFO"):
        async with asyncio.timeout(20):
            await supervisor.stop(hurried=True)

    assert "waiting for workers.mock-0 (pid" in caplog.text
    assert "which is still starting" in caplog.text
    assert "did not end in time and is killed" in caplog.text


async def test_ctrl_c_waits_for_a_part_that_has_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_ENDS", 0.0)
    # It counts once more when it has said that it serves.
    supervisor = make(f"{SERVE}{COUNT}{UNTIL_TOLD}import time; time.sleep(0.5)")
    await supervisor.start()
    await lives(tmp_path, 2)

    await supervisor.stop(hurried=True)

    assert not supervisor.unclean


def test_ctrl_c_is_left_to_the_supervisor_from_the_first_import_of_a_child_on(tmp_path: Path) -> None:
    # The library that commands are made with is imported first, and takes a while.
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")

    done = subprocess.run(serve_command([]), env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=30)

    assert done.returncode == 7


async def test_a_part_that_is_to_take_new_settings_by_a_restart_ends_and_lives_again(
    make: Make, tmp_path: Path
) -> None:
    supervisor = make(f"{SERVE}{UNTIL_TOLD}")
    assert supervisor.names() == ["workers.mock-0"]

    await supervisor.start()
    await lives(tmp_path, 1)
    for child in supervisor.running():
        child.restart()

    await lives(tmp_path, 2)


#: Says that it serves, and ends by no SIGTERM.
DEAF = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); {SERVE}"


async def test_a_part_that_does_not_end_for_a_restart_is_killed_and_lives_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEYOND", 0.1)
    supervisor = make(f"{DEAF}{COUNT}import time; time.sleep(600)", patience=0.0)

    await supervisor.start()
    await lives(tmp_path, 2)
    for child in supervisor.running():
        child.restart()

    await lives(tmp_path, 4)


async def test_a_frontend_that_hangs_leaves_the_workers_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BEYOND", 0.1)
    hangs = "time.sleep(600) if 'frontend' in sys.argv else signal.sigwait([signal.SIGTERM]); "
    program = f"import time; {DEAF}{COUNT}{hangs}time.sleep(0.5); lives.unlink()"
    supervisor = Supervisor(
        [Part("workers.mock", 0), Part("frontend")],
        [sys.executable, "-c", program, str(tmp_path / "lives")],
        lambda part: 0.0 if part.only == "frontend" else 20.0,
    )
    await supervisor.start()
    await lives(tmp_path, 2)

    async with asyncio.timeout(20):
        await supervisor.stop(hurried=False)

    assert not (tmp_path / "lives").exists()
    assert "frontend (pid" in caplog.text
    assert "workers.mock-0 (pid" not in caplog.text
