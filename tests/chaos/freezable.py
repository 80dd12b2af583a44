"""A worker whose engine can be frozen and thawed by signals, in a process of its own.

``python -m tests.chaos.freezable CONFIG WORKER MIGRATION_LIMIT [KEY=VALUE …]`` runs the mocker as a worker of a config
file. SIGUSR1 freezes its engine behind a live event loop, SIGUSR2 thaws it, and SIGALRM blocks the event loop for
`BLOCKED` seconds.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

from dynamo_core import EngineConfig, WorkerConfig
from dynamo_plugin_engine_mocker.clock import MonotonicClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_runtime import run

#: Seconds that the event loop stands still.
BLOCKED = 20.0


class StoppableClock(MonotonicClock):
    """A clock that stands still on demand."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()

    async def sleep_until(self, deadline: float) -> None:
        await super().sleep_until(deadline)
        await self.running.wait()


class Freezable(MockerEngine):
    """The mocker, which does what signals say."""

    def __init__(self, config: MockerConfig, worker: WorkerConfig) -> None:
        self._stoppable = StoppableClock()
        super().__init__(config, worker, clock=self._stoppable)

    async def start(self, worker_id: int) -> EngineConfig:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._stoppable.running.clear)
        loop.add_signal_handler(signal.SIGUSR2, self._stoppable.running.set)
        loop.add_signal_handler(signal.SIGALRM, time.sleep, BLOCKED)
        return await super().start(worker_id)


def main(argv: list[str]) -> None:
    config_file, name, limit, *overrides = argv
    settings: dict[str, Any] = {"fixed_itl_ms": 20, "max_num_batched_tokens": 128}
    worker = WorkerConfig(worker=name, model_name=name, migration_limit=int(limit))
    run(Freezable(MockerConfig(**settings), worker), worker, config_file=config_file, overrides=overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
