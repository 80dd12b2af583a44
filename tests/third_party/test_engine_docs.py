"""Follows `docs/tutorials/write-an-engine.md` literally: writes files, types commands, compares what comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dynamo_testing.servers.ports import free_port

from tests.e2e.conftest import Log

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "write-an-engine.md").read_text()

#: Commands that go on until they are told to end, and what their log says when they are ready.
READY = {
    "dynamo serve ": "ready for requests at",
    "dynamo frontend ": "listening at",
    "python main.py --model-name": "serving ",
}
#: Seconds for one command, for a server to be ready, and for it to end.
COMMAND, START, STOP = 120.0, 90.0, 60.0


@dataclass(frozen=True)
class Step:
    """A file to write, commands to type, what they must print, or a heading: where a reader ends what still runs."""

    kind: str
    text: str
    path: str = ""


def renamed(text: str) -> str:
    """Return the text with a name that is not installed, so that no engine made from the page is met."""
    return text.replace("shout", "bongo7").replace("Shout", "Bongo7")


def steps() -> Iterator[Step]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$|^## ([^\n]+)$", PAGE, re.MULTILINE | re.DOTALL)
    for language, text, heading in (match.groups() for match in found):
        if heading is not None:
            yield Step("heading", heading)
        elif file := re.match(r"# file: (\S+)\n", text):
            yield Step("file", renamed(text[file.end() :]), renamed(file[1]))
        elif language in ("sh", "text"):
            yield Step(language, renamed(text))


class Reader:
    """A user's shell with an environment of its own, in an empty folder."""

    def __init__(self, root: Path) -> None:
        self._bin = root / "environment" / "bin"
        self._folder = root / "folder"
        self._folder.mkdir()
        self._home = self._folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._bin.parent], check=True, timeout=60)
        # Whatever is installed where the tests run is there too; what the page installs goes into the new environment.
        here = sysconfig.get_path("purelib")
        [site] = (self._bin.parent / "lib").glob("*/site-packages")
        (site / "everything.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        command = f"#!{self._bin}/python\nfrom dynamo_runtime.cli.main import main\nmain()\n"
        (self._bin / "dynamo").write_text(command)
        (self._bin / "dynamo").chmod(0o755)
        self._port = free_port()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        self._environment = kept | {
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "XDG_CACHE_HOME": str(root / "cache"),
            # No network, and no library again.
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "DYN_HTTP_PORT": str(self._port),
            # Where discovery keeps its records if nobody says so.
            "TMPDIR": str(root),
            "DYN_CLIENT__DRAIN_GRACE": "0.1",
        }
        self._running: list[Running] = []
        self.last = ""
        self.said = ""

    def write(self, path: str, text: str) -> None:
        target = self._home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def type(self, commands: str) -> None:
        """Type commands, and wait for their end or until the server that they start is ready."""
        text = commands.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}").strip()
        ready = next((words for start, words in READY.items() if text.startswith(start)), None)
        if ready is not None:
            server = Running(text, self._folder, self._environment)
            self._running.append(server)
            server.wait_for(ready)
            return
        self.last = text
        where = self._home / "where"
        done = subprocess.run(
            ["bash", "-ec", f"{text}\npwd > {where}"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND,
            check=False,
        )
        self.said = done.stdout
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        self._folder = Path(where.read_text().strip())

    def compare(self, shown: str) -> None:
        """Assert that the output has a line with each shown piece, where … stands for anything.

        A worker that has just begun may not be known yet, so requests are made again for a while.
        """
        pieces = [re.compile(".*".join(map(re.escape, line.split("…")))) for line in shown.splitlines()]
        deadline = time.monotonic() + START
        while missing := [piece.pattern for piece in pieces if not piece.search(self.said)]:
            again = self.last.startswith("curl") and time.monotonic() < deadline
            assert again, f"{self.last}\nsays\n{self.said}\nwithout\n{missing}"
            time.sleep(0.2)
            self.type(self.last)

    def end_all(self) -> None:
        """Press Ctrl-C in every terminal, the last one first."""
        while self._running:
            server = self._running.pop()
            assert server.end() == 0, server.log

    def close(self) -> None:
        for server in self._running:
            server.kill()


class Running:
    """A process in a terminal of its own."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log = Log(self.process.stderr)

    @property
    def log(self) -> str:
        return str(self._log)

    def wait_for(self, words: str) -> None:
        assert self._log.until(re.escape(words), START), f"it never says {words!r}:\n{self.log}"

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)
        self._log.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.timeout(300)
def test_following_the_page_gives_its_output(reader: Reader) -> None:
    for step in steps():
        if step.kind == "file":
            reader.write(step.path, step.text)
        elif step.kind == "sh":
            reader.type(step.text)
        elif step.kind == "text":
            reader.compare(step.text)
        else:
            reader.end_all()
    reader.end_all()
