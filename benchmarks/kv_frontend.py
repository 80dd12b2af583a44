"""What the `kv` router adds to the frontend's CPU time per request, beside `round-robin` in the same run.

Two frontends with two mocker workers each; only the frontend processes are measured. Prompts are short; of about 3,900
tokens that begin as others do but for the last eighth, as chats do; and as long, but all different from the first word,
so that every block of each is told of when it is stored, and again when it is evicted: the worst there is.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
from dynamo_testing.servers.ports import free_port
from dynamo_testing.tiny_model import make_tokenizer_folder

from benchmarks.children import ChildFailed, Children, answers_ready, parts_of
from benchmarks.http1 import Endpoint
from benchmarks.load import Target, cpu_per_request
from benchmarks.loops import run_reporting
from benchmarks.meters import ProcessMeter

#: What is promised: the CPU time of `kv` as a multiple of that of `round-robin`.
LIMITS: Final[dict[str, float | None]] = {"short": 1.15, "3.9k": 1.3, "3.9k, all different": None}
_DEADLINE: Final = 300.0
_CONFIG: Final = """\
frontend: {{use: openai, host: 127.0.0.1, port: {port}}}
router: {{use: {router}}}
transport: {{use: tcp}}
discovery: {{use: file, path: {records}}}
log: {{level: warning}}
workers:
  mock:
    model: {{name: m, path: {model}}}
    engine: {{use: mocker, speedup_ratio: 0, block_size: 16}}
    replicas: 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks kv-frontend`."""
    parser.add_argument("--requests", type=int, default=600, help="requests of one measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each figure (default %(default)s)")


def run_kv_frontend(options: argparse.Namespace) -> int:
    """Print the figures; return the exit code: 1 if one of them is above what is promised, or a server failed."""
    return run_reporting(_measure(options), (ChildFailed, TimeoutError), f"not done after {_DEADLINE:g} s")


async def _measure(options: argparse.Namespace) -> int:
    draw = random.Random(1)
    failed = False
    async with asyncio.timeout(_DEADLINE):
        with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as name:
            folder = Path(name)
            model = make_tokenizer_folder(folder / "model")
            async with Children(folder, None) as children:
                sides = {router: await _start(children, folder, model, router) for router in ("round-robin", "kv")}
                for prompt, limit in LIMITS.items():
                    words = 6 if prompt == "short" else _words_of(3900)
                    common = _prompt(draw, words * 7 // 8) if prompt == "3.9k" else ""
                    count = options.requests if prompt == "short" else max(options.requests // 6, 1)
                    taken: dict[str, list[float]] = {router: [] for router in sides}
                    for number in range(options.rounds + 1):
                        own = words // 8 if common else words
                        prompts = [f"{common} {_prompt(draw, own)}" for _ in range(count)]
                        for router, side in sides.items() if number % 2 else reversed(sides.items()):
                            cpu = await _cpu(side, prompts)
                            if number:
                                taken[router].append(cpu)
                    base, ours = (statistics.median(taken[router]) for router in ("round-robin", "kv"))
                    bad = limit is not None and ours > limit * base
                    failed |= bad
                    promise = f"; promised {limit}{'   MISSED' if bad else ''}" if limit is not None else ""
                    print(
                        f"{prompt:<20} round-robin {base * 1e6:6.0f} µs of CPU a request, kv {ours * 1e6:6.0f}: "
                        f"{ours / base:.2f} times{promise}"
                    )
    return int(failed)


async def _start(children: Children, folder: Path, model: Path, router: str) -> Target:
    port = free_port()
    config = folder / f"{router}.yaml"
    config.write_text(_CONFIG.format(port=port, router=router, records=folder / f"{router}-records", model=model))
    command = Path(sys.executable).with_name("dynamo")
    pid = await children.start(router, [str(command), "serve", str(config)], lambda: answers_ready(port))
    return Target(router, Endpoint("127.0.0.1", port, ""), "m", ProcessMeter(parts_of(pid)["frontend"]))


async def _cpu(side: Target, prompts: list[str]) -> float:
    """Return CPU seconds of the frontend for one request."""
    bodies = (msgspec.json.encode({"model": side.model, "prompt": prompt, "max_tokens": 4}) for prompt in prompts)
    cpu, _ = await cpu_per_request(side, "/v1/completions", bodies, clients=8)
    return cpu


def _prompt(draw: random.Random, words: int) -> str:
    return " ".join(str(draw.randrange(10_000, 100_000)) for _ in range(words))


def _words_of(tokens: int) -> int:
    """Return how many made-up words make about so many tokens of the tiny tokenizer: a space and five digits each."""
    return tokens // 6
