"""A worker whose engine computes every prompt for long, in a process of its own.

``python -m tests.chaos.prefilling CONFIG WORKER SECONDS [KEY=VALUE …]``. A worker called `blocking` blocks its event
loop meanwhile, as a library without threads does; any other one waits.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator

from dynamo_core import EngineConfig, GenerateContext, LLMEngineOutput, PreprocessedRequest, WorkerConfig
from dynamo_runtime import run

log = logging.getLogger(__name__)

ANSWER = list(b"done")


class Prefilling:
    """An engine that takes `seconds` for a prompt."""

    def __init__(self, model: str, seconds: float, *, blocks: bool) -> None:
        self._model = model
        self._seconds = seconds
        self._blocks = blocks

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self._model)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        log.warning("it prefills")
        if self._blocks:
            time.sleep(self._seconds)  # noqa: ASYNC251 - what is tested
        else:
            await asyncio.sleep(self._seconds)
        yield LLMEngineOutput.stop().with_tokens(ANSWER)

    async def cleanup(self) -> None:
        """Nothing to release."""


def main(argv: list[str]) -> None:
    config_file, name, seconds, *overrides = argv
    engine = Prefilling(name, float(seconds), blocks=name == "blocking")
    run(engine, WorkerConfig(worker=name, model_name=name), config_file=config_file, overrides=overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
