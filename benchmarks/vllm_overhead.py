"""What our stack costs over vLLM alone: tokens per second and time to the first token, of one model in one run.

`python -m benchmarks.vllm_overhead MODEL-FOLDER`, in an environment with vLLM (`make test-vllm` sets one up for a CPU).
Three targets take turns, in changing order: vLLM's AsyncLLM in this process; the engine plugin around the same one; and
`dynamo serve` with an engine of its own, over HTTP. A small model on a CPU shows the cost at its worst: its tokens
cost next to nothing, and all processes share the cores.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamo_core import WorkerConfig
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine

from benchmarks.children import Children
from benchmarks.loops import run
from benchmarks.overhead import (
    MODEL,
    Results,
    Stream,
    add_load,
    greedy,
    in_process,
    longest,
    measure,
    of_engine,
    publish,
    served,
)


def through_vllm(engine: VllmEngine) -> Stream:
    """Ask the AsyncLLM inside the plugin as a program around vLLM would."""
    vllm: Any = engine._engine
    keys = itertools.count()

    async def stream(prompt: list[int], limit: int) -> AsyncIterator[Sequence[int]]:
        params, _ = engine._sampling_params(greedy(prompt, limit))
        async for output in vllm.generate({"type": "token", "prompt_token_ids": prompt}, params, f"bare-{next(keys)}"):
            yield output.outputs[0].token_ids

    return stream


async def compare(options: argparse.Namespace) -> Results:
    """Measure all three."""
    settings = {
        "max_model_len": longest(options) + 1,
        "enforce_eager": options.eager,
        "max_num_seqs": max(options.streams),
        **({"kv_cache_memory_bytes": options.kv_bytes} if options.kv_bytes else {}),
    }
    engine = VllmEngine(VllmConfig(**settings), WorkerConfig(model_name=MODEL, model_path=str(options.model)))
    with tempfile.TemporaryDirectory() as folder:
        try:
            await engine.start(1)
            async with Children(Path(folder), None) as children:
                worker = {"use": "vllm", **settings}
                targets = [
                    in_process("vLLM alone", through_vllm(engine)),
                    of_engine(engine),
                    await served(children, Path(folder), worker, options.model, processes=True),
                ]
                return await measure(targets, options)
        finally:
            await engine.cleanup()


def main(arguments: list[str]) -> int:
    """Print a table per level."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_overhead", description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--eager", action="store_true", help="no compiling: for small models on a CPU")
    parser.add_argument("--kv-bytes", type=int, help="memory for the KV cache")
    add_load(parser, streams="1,16", prompt=60, tokens=200, rounds=6)
    options = parser.parse_args(arguments)
    options.model = options.model.resolve()
    publish(run(compare(options)), options, {"model": options.model, "vLLM": import_module("vllm").__version__})
    return 0


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
