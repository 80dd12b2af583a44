"""Extensions for the suite: one that does nothing, and one that reads every request event with candidates.

The suite copies this file beside the entry points that name it, so that `dynamo serve` finds it as an installed plugin.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from dynamo_core import Extension, RequestEvent, hookimpl

DYNAMO_API = 1

_MODULE: Final = "dynamo_bench_extensions"


class Idle(Extension):
    """Is there."""

    NAME = "idle"


class Subscriber(Extension):
    """Counts the events of every kind, as the least that a reader of all does."""

    NAME = "subscriber"

    async def start(self) -> None:
        self.counts: dict[type[RequestEvent], int] = {}
        self.subscription = self.services.requests.subscribe(candidates=8)
        self.spawn(self._count(), "count events")

    async def _count(self) -> None:
        while events := await self.subscription.batch():
            for event in events:
                self.counts[type(event)] = self.counts.get(type(event), 0) + 1


@hookimpl
def dynamo_register_extensions() -> list[type[Extension]]:
    return [Idle, Subscriber]


def install(folder: Path) -> None:
    """Write the distribution into a folder, to be put on the import path."""
    info = folder / f"{_MODULE}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(["[dynamo]\n", *(f"extension-{cls.NAME} = {_MODULE}\n" for cls in (Idle, Subscriber))])
    )
    shutil.copyfile(__file__, folder / f"{_MODULE}.py")
