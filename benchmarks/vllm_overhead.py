"""What our stack costs over vLLM alone: tokens per second and time to the first token, of one model in one run.

`python -m benchmarks.vllm_overhead MODEL-FOLDER`, in an environment with vLLM (`make test-vllm` sets one up for a CPU).
Three targets take turns, in changing order: vLLM's AsyncLLM in this process; the engine plugin around the same one; and
`dynamo serve` with an engine of its own, over HTTP. A small model on a CPU shows the cost at its worst: its tokens
cost next to nothing, and all processes share the cores.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_core import (
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    WorkerConfig,
)
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_testing import mock_context
from dynamo_testing.ports import free_port

from benchmarks.http1 import BadResponse, Connection, Endpoint, fetch
from benchmarks.loops import LOOP_NAME, run

#: Seconds for the server to load the model.
READY = 300.0

#: One answer: seconds to its first token, and how many tokens there were.
Asked = tuple[float, int]
Ask = Callable[[list[int], int], Awaitable[Asked]]


@dataclass
class Seen:
    """What the rounds of one target gave."""

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


async def through_vllm(engine: VllmEngine, key: Iterator[int], prompt: list[int], limit: int) -> Asked:
    """Asks the AsyncLLM inside the plugin as a program around vLLM would."""
    vllm: Any = engine._engine
    params, _ = engine._sampling_params(request(prompt, limit))
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async for output in vllm.generate({"type": "token", "prompt_token_ids": prompt}, params, f"bare-{next(key)}"):
        first = first or time.perf_counter()
        tokens += len(output.outputs[0].token_ids)
    return first - begun, tokens


async def through_plugin(engine: VllmEngine, prompt: list[int], limit: int) -> Asked:
    """Asks the plugin as a worker does."""
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async for item in engine.generate(request(prompt, limit), mock_context()):
        first = first or time.perf_counter()
        tokens += len(item.token_ids)
    return first - begun, tokens


class Http:
    """Asks the whole stack; connections are kept."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []

    async def __call__(self, prompt: list[int], limit: int) -> Asked:
        """One streamed answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = self._idle.pop() if self._idle else await Connection.open(self._endpoint)
        reply = await connection.exchange(
            self._endpoint.post("/v1/completions", json.dumps(body).encode()), stream=True, timeout=120
        )
        self._idle.append(connection)
        ending = reply.stream.ending() if reply.stream is not None else None
        if reply.status != 200 or reply.stream is None or ending is None or ending.completion_tokens is None:
            raise BadResponse(f"status {reply.status}, {ending}")
        # The head of the answer comes with the first token: before it, the answer might still be an error.
        return reply.first_byte - reply.sent, ending.completion_tokens


def request(prompt: list[int], limit: int) -> PreprocessedRequest:
    """A greedy request for exactly `limit` tokens."""
    return PreprocessedRequest(
        token_ids=prompt,
        stop_conditions=StopConditions(max_tokens=limit, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
    )


async def one_round(ask: Ask, prompts: Iterator[list[int]], streams: int, tokens: int, seen: Seen | None) -> None:
    """`streams` answers at once, and then eight short ones, one after the other. Raises RuntimeError if tokens lack."""
    begun = time.perf_counter()
    answers = await asyncio.gather(*(ask(next(prompts), tokens) for _ in range(streams)))
    seconds = time.perf_counter() - begun
    single = [await ask(next(prompts), 4) for _ in range(8)]
    if {count for _, count in answers} != {tokens}:
        raise RuntimeError(f"answers of {sorted({count for _, count in answers})} tokens, not {tokens}")
    if seen is not None:
        seen.rates.append(streams * tokens / seconds)
        seen.first += [first * 1000 for first, _ in answers]
        seen.alone += [first * 1000 for first, _ in single]


@asynccontextmanager
async def served(model: Path, settings: dict[str, Any], folder: Path) -> AsyncIterator[Endpoint]:
    """`dynamo serve` with one worker, until the block ends."""
    port = free_port()
    config = {
        "frontend": {"host": "127.0.0.1", "port": port},
        "transport": {"use": "tcp"},
        "discovery": {"use": "file", "path": str(folder / "discovery")},
        "workers": {
            "m": {"model": {"name": "m", "path": str(model)}, "engine": {"use": "vllm", **settings}, "grace_period": 0}
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamo_core.cli.main", "serve", str(path), stdout=log, stderr=log
        )
    endpoint = Endpoint("127.0.0.1", port, "")
    try:
        async with asyncio.timeout(READY):
            while not await _ready(endpoint):
                if server.returncode is not None:
                    raise RuntimeError((folder / "log").read_text()[-2000:])
                await asyncio.sleep(0.5)
        yield endpoint
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


async def _ready(endpoint: Endpoint) -> bool:
    try:
        return (await fetch(endpoint, "/ready", timeout=5)).status == 200
    except (OSError, BadResponse, TimeoutError):
        return False


async def compare(options: argparse.Namespace) -> dict[str, Seen]:
    """Measures all three."""
    settings = {
        "max_model_len": options.prompt + options.tokens + 1,
        "enforce_eager": options.eager,
        "max_num_seqs": options.streams,
        **({"kv_cache_memory_bytes": options.kv_bytes} if options.kv_bytes else {}),
    }
    engine = VllmEngine(VllmConfig(**settings), WorkerConfig(model_name="m", model_path=str(options.model)))
    key = itertools.count()
    # Prompts that share nothing: no target profits from what another has cached.
    numbers = itertools.count(10)
    prompts = ([next(numbers) % 900 + 10 for _ in range(3)] * (options.prompt // 3) for _ in itertools.count())
    seen = {name: Seen() for name in ("vLLM alone", "engine plugin", "whole stack")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            await engine.start(1)
            async with served(options.model, settings, Path(folder)) as endpoint:
                asks: dict[str, Ask] = {
                    "vLLM alone": lambda prompt, limit: through_vllm(engine, key, prompt, limit),
                    "engine plugin": lambda prompt, limit: through_plugin(engine, prompt, limit),
                    "whole stack": Http(endpoint),
                }
                for ask in asks.values():
                    await one_round(ask, prompts, options.streams, options.tokens, None)
                for number in range(options.rounds):
                    order = [*asks][number % 3 :] + [*asks][: number % 3]
                    for name in order:
                        await one_round(asks[name], prompts, options.streams, options.tokens, seen[name])
        finally:
            await engine.cleanup()
    return seen


def main(arguments: list[str]) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_overhead", description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--streams", type=int, default=16, help="answers at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each")
    parser.add_argument("--prompt", type=int, default=60, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--eager", action="store_true", help="no compiling: for small models on a CPU")
    parser.add_argument("--kv-bytes", type=int, help="memory for the KV cache")
    options = parser.parse_args(arguments)
    options.model = options.model.resolve()
    seen = run(compare(options))
    print(
        f"{options.streams} streams of {options.tokens} tokens, {options.rounds} rounds, {LOOP_NAME}, "
        f"load {os.getloadavg()[0]:.1f}; medians, and ratios to vLLM alone round by round"
    )
    print(f"{'':15}{'tok/s':>9}{'ratio':>8}{'TTFT ms':>10}{'TTFT ms, one at a time':>25}")
    bare = seen["vLLM alone"]
    for name, found in seen.items():
        ratio = statistics.median(a / b for a, b in zip(found.rates, bare.rates, strict=True))
        print(
            f"{name:15}{statistics.median(found.rates):>9.0f}{ratio:>8.2f}"
            f"{statistics.median(found.first):>10.1f}{statistics.median(found.alone):>25.1f}"
        )
    return 0


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
