"""Triggers of a reload other than HTTP: SIGHUP, and changed files."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from dynamo_core.files import read_file
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.assembly.reload import Reload

log = logging.getLogger(__name__)

#: Seconds between two looks at the files.
LOOK = 2.0


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, whose end SIGHUP tells then."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False


class ReloadTriggers(AsyncResource):
    """Triggers that have the settings reloaded; `reload` logs the outcome.

    With `watch` it does so when one of `files` changes: a mounted file may be replaced by another one behind a link, so
    that only its content tells.
    """

    def __init__(self, reload: Reload, files: Callable[[], Collection[Path]], *, watch: bool) -> None:
        self._reload = reload
        self._files = files
        self._tasks = TaskSet()
        if watch:
            self._tasks.spawn(self._watch(), name="watch settings")

    async def aclose(self) -> None:
        """End the watch."""
        await self._tasks.aclose()

    def hung_up(self) -> None:
        """Handle SIGHUP."""
        self._tasks.spawn(self._reload(False), name="reload at SIGHUP")

    async def _watch(self) -> None:
        looks = _WatchedFiles()
        known = seen = await asyncio.to_thread(looks.contents, self._files())
        while True:
            await asyncio.sleep(LOOK)
            before, seen = seen, await asyncio.to_thread(looks.contents, self._files())
            # What is being written has another content at the next look.
            if seen != known and seen == before:
                log.info("a file of the settings has changed")
                if (await self._reload(False)).status != "busy":
                    known = seen


class _WatchedFiles:
    """A reader of files whose status has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, str]] = {}

    def contents(self, files: Collection[Path]) -> dict[Path, str]:
        """Return a digest of each file; empty if it cannot be read."""
        return {path: self._digest(path) for path in files}

    def _digest(self, path: Path) -> str:
        try:
            stat = path.stat()
            status = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if path not in self._known or self._known[path][0] != status:
                self._known[path] = (status, sha256(read_file(path).data).hexdigest())
        except OSError:
            return ""
        return self._known[path][1]
