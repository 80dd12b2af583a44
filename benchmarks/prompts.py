"""What long prompts cost the frontend, in CPU time per request: a short one, and such of about 4,000 tokens.

Of the long ones there are 64 that come again and again; such that share their first 2,000 words and differ in the last
16; such that share seven eighths of their words; and such that differ from the first word on. The probe, which has no
memory, encodes all of each. Frontend and worker are processes of their own, and only the frontend is measured.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Final

import msgspec
from dynamo_testing.tiny_model import make_tokenizer_folder

from benchmarks.children import ChildFailed, Children
from benchmarks.load import PROMPT, Target, cpu_per_request
from benchmarks.loops import run_reporting
from benchmarks.runner import two_cpus
from benchmarks.suite import Bench

#: What is promised, in CPU seconds per 1,000 requests, on a machine where a short request takes the probe 0.06.
LIMITS: Final[dict[str, float]] = {"64 repeated": 0.4, "another end": 1.0}
FLOOR: Final = 0.06

_CLIENTS: Final = 32
_WORDS: Final = 2000
_DEADLINE: Final = 300.0
#: Three or four of them make a word, of about two tokens.
_SYLLABLES: Final = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu", "ch", "st", "an", "er", "in", "on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks prompts`."""
    parser.add_argument("--requests", type=int, default=1500, help="requests of one measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure (default %(default)s)")


def run_prompts(options: argparse.Namespace) -> int:
    """Print the figures; return the exit code: 1 if one of them is above what is promised, or a server failed."""
    return run_reporting(_measure(options), (ChildFailed, TimeoutError), f"not done after {_DEADLINE:g} s")


class _Prompts:
    """Makes the prompts of each kind; none of those that differ is ever made twice."""

    def __init__(self) -> None:
        draw = random.Random(1)

        def words(count: int) -> str:
            return " ".join("".join(draw.choices(_SYLLABLES, k=draw.choice((3, 4)))) for _ in range(count))

        same = cycle([words(_WORDS) for _ in range(64)])
        shared, most = words(_WORDS), words(_WORDS * 7 // 8)
        self._kinds: dict[str, Callable[[], str]] = {
            "short": lambda: PROMPT,
            "64 repeated": lambda: next(same),
            "another end": lambda: f"{shared} {words(16)}",
            "an eighth differs": lambda: f"{most} {words(_WORDS // 8)}",
            "all different": lambda: words(_WORDS),
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def make(self, kind: str, count: int) -> list[str]:
        """Return prompts of a kind."""
        return [self._kinds[kind]() for _ in range(count)]


async def _measure(options: argparse.Namespace) -> int:
    cpus = two_cpus()
    if cpus is not None:
        os.sched_setaffinity(0, {cpus[0]})
    prompts = _Prompts()
    taken: dict[tuple[str, str], list[float]] = {}
    async with asyncio.timeout(_DEADLINE):
        with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
            async with Children(Path(folder), cpus[1] if cpus else None) as children:
                bench = Bench(children, Path(folder), inproc=False, cpus=cpus)
                make_tokenizer_folder(bench.model)
                targets = [await bench.ours("dynamo", "speedup_ratio: 0"), await bench.probe("probe", 0.0)]
                for number in range(options.rounds + 1):
                    for kind in prompts:
                        count = options.requests if number else 128
                        if kind in ("an eighth differs", "all different"):
                            count = max(count // 6, 1)
                        asked = prompts.make(kind, count)
                        for target in targets if number % 2 else reversed(targets):
                            cpu, tokens = await _cpu(target, asked)
                            if number:
                                taken.setdefault((kind, target.name), []).append(cpu * 1000)
                            elif target is targets[0]:
                                print(f"{kind}: {tokens:.0f} tokens a prompt")
    return _report(taken)


async def _cpu(target: Target, prompts: list[str]) -> tuple[float, float]:
    """Return CPU seconds of the frontend for one request, and the mean number of tokens of the prompts."""
    bodies = (
        msgspec.json.encode(
            {"model": target.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
        )
        for prompt in prompts
    )
    cpu, replies = await cpu_per_request(target, "/v1/chat/completions", bodies, clients=_CLIENTS)
    return cpu, statistics.mean(msgspec.json.decode(reply)["usage"]["prompt_tokens"] for reply in replies)


def _report(taken: dict[tuple[str, str], list[float]]) -> int:
    medians = {key: statistics.median(values) for key, values in taken.items()}
    slower = medians["short", "probe"] / FLOOR
    print(f"\nCPU s per 1,000 requests, {_CLIENTS} clients. The machine of the limits is {slower:.1f} times as fast.")
    missed = False
    for kind in dict.fromkeys(kind for kind, _ in taken):
        ours = taken[kind, "dynamo"]
        line = f"{kind:<18} dynamo {medians[kind, 'dynamo']:5.2f} ({min(ours):.2f}-{max(ours):.2f})"
        line += f"  probe {medians[kind, 'probe']:5.2f}"
        limit = LIMITS.get(kind)
        if limit is not None:
            bad = medians[kind, "dynamo"] > limit * slower
            missed |= bad
            line += f"  limit {limit}, here {limit * slower:.2f}{'   MISSED' if bad else ''}"
        print(line)
    return int(missed)
