"""What a stack costs over the library of its engine: the same load on several targets in turn, in one run.

`transformers_overhead` and `vllm_overhead` say what the targets are. Each gets the load at every level, a number of
streams at once, in every round; the order of the targets turns with the rounds. Ratios are of the figures of one round.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from dynamo_core import PreprocessedRequest, SamplingOptions, StopConditions
from dynamo_core.contracts.engine import LLMEngine
from dynamo_testing import mock_context
from dynamo_testing.servers.ports import free_port

from benchmarks.children import Children, answers_ready, parts_of
from benchmarks.http1 import BadResponse, Connection, Endpoint
from benchmarks.loops import LOOP_NAME
from benchmarks.meters import ProcessMeter
from benchmarks.stats import Spread, percentile, ratio, spread

#: Seconds for a server to load its model, and for one answer.
READY: Final = 300.0
ANSWER: Final = 300.0
#: The model's name in requests.
MODEL: Final = "m"
#: Prompts of this many tokens are asked one by one, to compare the tokens of the answers.
COMPARED: Final = 2
#: Tokens of each answer before anything is measured.
WARM_UP: Final = 16

#: The new tokens of one answer, as they come: of a prompt, and a number of tokens.
Stream = Callable[[list[int], int], AsyncIterator[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: seconds to its first token and to its last, and the number of its tokens."""

    first: float
    last: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked, and what it runs in: processes by the part that each is."""

    name: str
    ask: Callable[[list[int], int], Awaitable[Answer]]
    tokens: Callable[[list[int], int], Awaitable[list[int]]]
    processes: Mapping[str, ProcessMeter]


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one target at one level. Times in ms; `cpu` in cores, by process."""

    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float
    cpu: dict[str, float]


#: Of each level, the rounds of each target.
Results = dict[int, dict[str, list[Measured]]]


def in_process(name: str, stream: Stream) -> Target:
    """Return a target in this process."""

    async def ask(prompt: list[int], limit: int) -> Answer:
        begun, first, tokens = time.perf_counter(), 0.0, 0
        async with asyncio.timeout(ANSWER):
            async for new in stream(prompt, limit):
                first = first or time.perf_counter()
                tokens += len(new)
        return Answer(first - begun, time.perf_counter() - begun, tokens)

    async def tokens(prompt: list[int], limit: int) -> list[int]:
        async with asyncio.timeout(ANSWER):
            return [token async for new in stream(prompt, limit) for token in new]

    return Target(name, ask, tokens, {"client too": ProcessMeter(os.getpid(), children=True)})


def of_engine(engine: LLMEngine) -> Target:
    """Return an engine in this process, asked as a worker does."""
    numbers = itertools.count()

    async def stream(prompt: list[int], limit: int) -> AsyncIterator[Sequence[int]]:
        async for item in engine.generate(greedy(prompt, limit), mock_context(f"plugin-{next(numbers)}")):
            yield item.token_ids

    return in_process("engine plugin", stream)


async def served(
    children: Children, folder: Path, engine: Mapping[str, Any], model: Path, *, processes: bool
) -> Target:
    """Start `dynamo serve` with one worker in `children`, files in `folder`: as one process, or as several.

    Raises:
        ChildFailed: it ended, or was not ready within READY.
    """
    name = "several processes" if processes else "one process"
    port = free_port()
    records = folder / "discovery"
    config = {
        "frontend": {"host": "127.0.0.1", "port": port},
        "transport": {"use": "tcp" if processes else "inproc"},
        "discovery": {"use": "file", "path": str(records)} if processes else {"use": "memory"},
        "log": {"level": "warning"},
        "workers": {MODEL: {"model": {"name": MODEL, "path": str(model)}, "engine": dict(engine), "grace_period": 0}},
    }
    path = folder / f"{name.replace(' ', '-')}.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(path)]
    pid = await children.start(path.stem, command, lambda: answers_ready(port), deadline=READY)
    # What an engine starts counts as the worker.
    parts = parts_of(pid) if processes else {"all": pid}
    meters = {part: ProcessMeter(known, children=True) for part, known in parts.items()}
    http = _Http(Endpoint("127.0.0.1", port, ""))
    return Target(name, http.ask, http.tokens, meters)


class _Http:
    """Asks the whole stack; connections are kept."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []

    async def ask(self, prompt: list[int], limit: int) -> Answer:
        """Return one streamed answer."""
        reply = await self._post(prompt, limit, stream=True, stream_options={"include_usage": True})
        ending = reply.stream.ending() if reply.stream is not None else None
        if reply.status != 200 or ending is None or ending.completion_tokens is None:
            raise BadResponse(f"status {reply.status}, {ending}")
        # The head of the answer comes with the first token: before it, the answer might still be an error.
        return Answer(reply.first_byte - reply.sent, reply.ended - reply.sent, ending.completion_tokens)

    async def tokens(self, prompt: list[int], limit: int) -> list[int]:
        """Return the tokens of an answer."""
        reply = await self._post(prompt, limit, return_token_ids=True)
        if reply.status != 200:
            raise BadResponse(f"status {reply.status}: {reply.body[:200]!r}")
        ids: list[int] = msgspec.json.decode(reply.body)["choices"][0]["token_ids"]
        return ids

    async def _post(self, prompt: list[int], limit: int, *, stream: bool = False, **more: object) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        data = msgspec.json.encode({**body, "stream": stream, **more})
        connection = self._idle.pop() if self._idle else await Connection.open(self._endpoint)
        reply = await connection.exchange(self._endpoint.post("/v1/completions", data), stream=stream, timeout=ANSWER)
        self._idle.append(connection)
        return reply


def greedy(prompt: list[int], limit: int) -> PreprocessedRequest:
    """Return a greedy request for exactly `limit` tokens."""
    return PreprocessedRequest(
        token_ids=prompt,
        stop_conditions=StopConditions(max_tokens=limit, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
    )


def prompts(tokens: int) -> Iterator[list[int]]:
    """Yield prompts of `tokens` tokens, give or take a quarter; the same ones in each run.

    They share nothing: no target profits from what it has cached. Nor from sizes that it has seen: GPU libraries keep
    what they worked out for a size, and real traffic hardly has the same ones again.
    """
    chance = random.Random(0)
    while True:
        # Ids that every model has, and that are not special in most.
        yield chance.choices(range(10, 900), k=chance.randint(tokens - tokens // 4, tokens + tokens // 4))


def longest(options: argparse.Namespace) -> int:
    """Return tokens of the longest prompt with its answer."""
    tokens: int = options.prompt + options.prompt // 4 + options.tokens
    return tokens


def add_load(parser: argparse.ArgumentParser, *, streams: str, prompt: int, tokens: int, rounds: int) -> None:
    """Add the options of a load, with the defaults given."""
    parser.add_argument("--streams", type=_levels, default=streams, help="answers at once, of each level (%(default)s)")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of each answer (default %(default)s)")
    parser.add_argument(
        "--prompt", type=int, default=prompt, help="tokens of a prompt, on average (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="at most (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="all rounds together (default %(default)g)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")


def _levels(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


async def measure(targets: Sequence[Target], options: argparse.Namespace) -> Results:
    """Compare the tokens of all targets with those of the first, then measure each.

    Raises:
        RuntimeError: an answer has other tokens than the first target's, or not as many as asked for.
    """
    made = prompts(options.prompt)
    await _compare_tokens(targets, made, options.tokens)
    results: Results = {level: {target.name: [] for target in targets} for level in options.streams}
    for level in options.streams:
        asked = [next(made) for _ in range(level)]
        for target in targets:
            await _round(target, asked, WARM_UP)
    begun, longest = time.monotonic(), 0.0
    for number in range(options.rounds):
        started = time.monotonic()
        if number and started + longest > begun + options.seconds:
            break
        turn = number % len(targets)
        for level in options.streams:
            asked = [next(made) for _ in range(level)]
            for target in [*targets[turn:], *targets[:turn]]:
                found = await _round(target, asked, options.tokens)
                print(f"round {number + 1}: {level} streams, {target.name}: {found}", file=sys.stderr, flush=True)
                results[level][target.name].append(found)
        longest = max(longest, time.monotonic() - started)
    return results


async def _compare_tokens(targets: Sequence[Target], made: Iterator[list[int]], limit: int) -> None:
    seen: set[int] = set()
    for number in range(COMPARED):
        prompt = next(made)
        # One at a time: the sums of a row may be rounded otherwise beside other rows.
        expected, *others = [await target.tokens(prompt, limit) for target in targets]
        for target, found in zip(targets[1:], others, strict=True):
            if found != expected:
                raise RuntimeError(f"prompt {number}: {target.name} gave {found}, {targets[0].name} gave {expected}")
        seen.update(expected)
    print(f"the same {limit} tokens from each for {COMPARED} prompts, {len(seen)} different ones in all", flush=True)


async def _round(target: Target, asked: Sequence[list[int]], limit: int) -> Measured:
    before = {part: await meter.read() for part, meter in target.processes.items()}
    begun = time.perf_counter()
    answers = await asyncio.gather(*(target.ask(prompt, limit) for prompt in asked))
    seconds = time.perf_counter() - begun
    after = {part: await meter.read() for part, meter in target.processes.items()}
    if wrong := {answer.tokens for answer in answers} - {limit}:
        raise RuntimeError(f"{target.name}: answers of {sorted(wrong)} tokens, not {limit}")
    first = sorted(answer.first * 1000 for answer in answers)
    between = [(answer.last - answer.first) * 1000 / max(1, limit - 1) for answer in answers]
    return Measured(
        len(asked) * limit / seconds,
        percentile(first, 0.5),
        percentile(first, 0.99),
        statistics.median(between),
        {
            part: ((usage.cpu_seconds or 0.0) - (before[part].cpu_seconds or 0.0)) / seconds
            for part, usage in after.items()
        },
    )


def publish(results: Results, options: argparse.Namespace, about: Mapping[str, object]) -> None:
    """Print a table per level, and write the JSON where wanted."""
    rounds = min(len(taken) for targets in results.values() for taken in targets.values())
    print(
        f"prompts of {options.prompt} tokens on average, answers of {options.tokens}, {LOOP_NAME}, "
        f"load {os.getloadavg()[0]:.1f}; medians of {rounds} rounds, and ratios to the first line round by round "
        "(smallest–largest)"
    )
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for level, targets in results.items():
        columns = f"{'tok/s':>8}{'ratio':>20}{'TTFT p50, p99 ms':>20}{'TPOT ms':>9}{'ratio':>7}  CPU, cores"
        print(f"\n{f'{level} streams':19}{columns}")
        base = next(iter(targets.values()))
        for name, taken in targets.items():
            print(_line(name, taken, base))
    if options.json is not None:
        plain = {
            str(level): {name: [asdict(one) for one in taken] for name, taken in targets.items()}
            for level, targets in results.items()
        }
        load = {"prompt": options.prompt, "tokens": options.tokens}
        options.json.write_text(json.dumps({"about": {**about, **load}, "levels": plain}, indent=1, default=str) + "\n")


def _line(name: str, taken: Sequence[Measured], base: Sequence[Measured]) -> str:
    rates = _ratios(taken, base, "tokens_per_second")
    shown = "-" if rates is None else f"{rates.median:.3f} ({rates.low:.2f}–{rates.high:.2f})"
    # The tokens of a fast engine may all come at once.
    between = _ratios(taken, base, "between_p50")
    slower = "-" if between is None else f"{between.median:.3f}"
    cpu = ", ".join(f"{part} {statistics.median(one.cpu[part] for one in taken):.2f}" for part in taken[0].cpu)
    rate, first, late, each = (
        statistics.median(getattr(one, key) for one in taken)
        for key in ("tokens_per_second", "first_p50", "first_p99", "between_p50")
    )
    return f"{name:19}{rate:>8.0f}{shown:>20}{f'{first:.1f}, {late:.1f}':>20}{each:>9.2f}{slower:>7}  {cpu}"


def _ratios(taken: Sequence[Measured], base: Sequence[Measured], key: str) -> Spread | None:
    return spread(ratio(getattr(one, key), getattr(other, key)) for one, other in zip(taken, base, strict=True))
