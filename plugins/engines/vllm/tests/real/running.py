"""Run as a script: an engine that runs until it is killed. Argument: a model."""

import asyncio
import sys

from dynamo_core import WorkerConfig
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine


async def main(model: str) -> None:
    """Say when it runs."""
    settings = VllmConfig(max_model_len=512, enforce_eager=True, block_size=32, kv_cache_memory_bytes=1 << 20)
    engine = VllmEngine(settings, WorkerConfig(model_name="m", model_path=model))
    await engine.start(1)
    sys.stdout.write("RUNS\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
