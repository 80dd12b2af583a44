"""How well the router `kv` chooses, beside others and inside `affinity`: times to the first token, hits, balance.

Eight mocker workers in one process, with the real routers, load tracker, pipeline and KV events, and the mocker's
timing of a real engine. Time is virtual (`virtual_time.py`): nothing waits, and the figures depend on the seed alone.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from dynamo_core import (
    AdmissionServices,
    EngineContext,
    PluginConfig,
    PluginRef,
    PreprocessedRequest,
    Principal,
    Router,
    RouterServices,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.plugins.loader import PluginLoader
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_router_affinity.router import AffinityConfig, AffinityRouter
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_plugin_router_load_aware.routers import LoadAwareConfig, PowerOfTwoRouter
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.assembly.resolve import load_parsers
from dynamo_runtime.dispatch.admission import NoAdmission
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.worker.worker import Worker, WorkerLimits
from dynamo_telemetry import Metrics
from dynamo_text import load_tokenizer

from benchmarks.plots import Curve, Panel, curves_svg
from benchmarks.stats import percentile
from benchmarks.traces import SHARED, UNSHARED, Chat, Traffic, make_trace
from benchmarks.virtual_time import run_at_once

#: What is promised: the mean time to the first token with one router, as a multiple of that with another.
LIMITS: Final[Mapping[str, Mapping[tuple[str, str], float]]] = {
    "shared": {
        ("kv", "round-robin"): 0.5,
        ("affinity, kv", "kv"): 1.02,
        ("affinity, kv without events", "kv without events"): 1.0,
    },
    "nothing shared": {("kv", "round-robin"): 1.05, ("affinity, kv", "kv"): 1.02},
}
TRAFFIC: Final[Mapping[str, Traffic]] = {"shared": SHARED, "nothing shared": UNSHARED}
WORKERS: Final = 8
#: A KV cache of 131,072 tokens: all workers together have room for what is asked again, one alone has not.
ENGINE: Final = MockerConfig(block_size=16, num_gpu_blocks=8192, context_length=32_768)
#: The first requests, as a share of all, meet empty caches with every router, and count for nothing.
WARM_UP: Final = 0.25
_MODEL: Final = "m"
#: Virtual seconds after which a run is given up.
_DEADLINE: Final = 3600.0

MakeRouter = Callable[[RouterServices, int], Router]

ROUTERS: Final[Mapping[str, MakeRouter]] = {
    "round-robin": lambda services, seed: RoundRobinRouter(PluginConfig(), services),
    "power-of-two": lambda services, seed: PowerOfTwoRouter(LoadAwareConfig(seed=seed), services),
    "kv": lambda services, seed: KvRouter(KvConfig(seed=seed), services),
    "kv, prefill_load_scale 2": lambda services, seed: KvRouter(KvConfig(seed=seed, prefill_load_scale=2), services),
    "affinity, kv": lambda services, seed: _sticky(services, KvConfig(seed=seed)),
    "kv without events": lambda services, seed: KvRouter(KvConfig(seed=seed, kv_events=False), services),
    "affinity, kv without events": lambda services, seed: _sticky(services, KvConfig(seed=seed, kv_events=False)),
}


def _sticky(services: RouterServices, config: KvConfig) -> Router:
    """Return a router that keeps chats with their workers, around `kv`."""
    return AffinityRouter(
        AffinityConfig(then=PluginRef(use="kv")), replace(services, inner=lambda ref: KvRouter(config, services))
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request.

    When it was asked and seconds to its first token, who answered, tokens of its prompt, and how many of these the
    worker had.
    """

    asked: float
    ttft: float
    worker: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Quality:
    """The figures of a run. Times in seconds; imbalances are the most of a worker over the mean of all."""

    requests: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    request_imbalance: float
    #: Of the tokens of prompts that were computed.
    token_imbalance: float

    @classmethod
    def of(cls, answers: Sequence[Answer], workers: int = WORKERS) -> "Quality":
        """Return those of at least one answer."""
        times = sorted(answer.ttft for answer in answers)
        asked = sum(answer.prompt_tokens for answer in answers)
        requests: Counter[int] = Counter()
        computed: Counter[int] = Counter()
        for answer in answers:
            requests[answer.worker] += 1
            computed[answer.worker] += answer.prompt_tokens - answer.cached_tokens
        return cls(
            requests=len(answers),
            hit_rate=sum(answer.cached_tokens for answer in answers) / asked,
            ttft_mean=sum(times) / len(times),
            ttft_p50=percentile(times, 0.5),
            ttft_p99=percentile(times, 0.99),
            request_imbalance=max(requests.values()) * workers / len(answers),
            token_imbalance=max(computed.values()) * workers / sum(computed.values()),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks kv-quality`."""
    parser.add_argument("--seed", type=int, default=1, help="of the traffic and of the routers (default %(default)s)")
    parser.add_argument("--svg", type=Path, help="draw the times to the first token into this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def run_kv_quality(options: argparse.Namespace) -> int:
    """Print the figures; return the exit code: 1 if one of them is above what is promised."""
    failed = False
    figures: dict[str, dict[str, Quality]] = {}
    panels = []
    for name, traffic in TRAFFIC.items():
        chats = make_trace(traffic, options.seed)
        print(f"{name}: TTFT in ms; hits of prompt tokens; most of a worker over the mean: requests, computed tokens")
        runs = {router: play(chats, router, options.seed) for router in ROUTERS}
        found = figures[name] = {router: Quality.of(answers) for router, answers in runs.items()}
        for router, quality in found.items():
            print(f"  {router:<28} {_line(quality, found['round-robin'])}")
        for (router, base), limit in LIMITS[name].items():
            ratio = found[router].ttft_mean / found[base].ttft_mean
            failed |= ratio > limit
            print(f"  {router} takes {ratio:.2f} of {base}; promised {limit:g}{'   MISSED' if ratio > limit else ''}")
        print()
        curves = [Curve(router, [1000 * answer.ttft for answer in answers]) for router, answers in runs.items()]
        panels.append(Panel(name, curves))
    if options.json:
        document = {name: {router: asdict(one) for router, one in found.items()} for name, found in figures.items()}
        options.json.write_text(json.dumps({"seed": options.seed, "traces": document}, indent=2) + "\n")
    if options.svg:
        options.svg.write_text(curves_svg(panels, "time to the first token, ms", "share of requests"))
    return int(failed)


def _line(quality: Quality, base: Quality) -> str:
    return (
        f"mean {1e3 * quality.ttft_mean:6.1f} ({quality.ttft_mean / base.ttft_mean:.2f}), p50 "
        f"{1e3 * quality.ttft_p50:6.1f}, p99 {1e3 * quality.ttft_p99:6.1f}; hits {quality.hit_rate:4.0%}; "
        f"{quality.request_imbalance:.2f}, {quality.token_imbalance:.2f}"
    )


def play(chats: Sequence[Chat], router: str, seed: int) -> list[Answer]:
    """Ask all that is in a trace, in virtual time, with fresh workers; the answers that count, as they were asked."""
    answers = run_at_once(_play(chats, ROUTERS[router], seed))
    answers.sort(key=lambda answer: answer.asked)
    return answers[int(len(answers) * WARM_UP) :]


async def _play(chats: Sequence[Chat], make_router: MakeRouter, seed: int) -> list[Answer]:
    async with asyncio.timeout(_DEADLINE), AsyncExitStack() as stack:
        models = await _start(stack, make_router, seed)
        answers: list[Answer] = []
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as people:
            for number, chat in enumerate(chats):
                people.create_task(_converse(models, chat, number, begun, answers))
        return answers


class _SeededDiscovery(MemoryDiscovery):
    """Gives workers the same ids in every run: where a session belongs depends on them."""

    def __init__(self, seed: int, metrics: Metrics) -> None:
        super().__init__(PluginConfig(), metrics)
        self._ids = Random(seed)

    def draw_id(self) -> int:
        return self._ids.getrandbits(63)


async def _start(stack: AsyncExitStack, make_router: MakeRouter, seed: int) -> Models:
    """Return a frontend without HTTP and its workers, all of which can be routed to."""
    metrics = Metrics()
    transport = InprocTransport(PluginConfig(), metrics)
    stack.push_async_callback(transport.aclose)
    discovery = _SeededDiscovery(seed, metrics)
    stack.push_async_callback(discovery.aclose)
    tracker = LoadTracker()
    pipeline = Pipeline(
        transport=transport,
        admission=NoAdmission(PluginConfig(), AdmissionServices(metrics)),
        tracker=tracker,
        deadlines=Deadlines(total=_DEADLINE),
        metrics=metrics,
    )
    stack.push_async_callback(pipeline.aclose)
    caller = Caller(transport)
    models = Models(
        discovery=discovery,
        pipeline=pipeline,
        caller=caller,
        make_router=lambda pool: make_router(
            RouterServices(
                pool=pool, tracker=tracker, events=transport.events(), directory=discovery, metrics=metrics, call=caller
            ),
            seed,
        ),
        announce=_announce,
        load_tokenizer=load_tokenizer,
        load_parsers=partial(load_parsers, PluginLoader()),
    )
    models.start()
    stack.push_async_callback(models.aclose)
    settings = WorkerConfig(model_name=_MODEL, worker="w")
    for number in range(WORKERS):
        worker = Worker(
            MockerEngine(ENGINE, settings),
            settings,
            transport=transport,
            discovery=discovery,
            metrics=metrics.scope(worker=f"w-{number}"),
            limits=WorkerLimits(grace_period=0, drain_timeout=1),
            announce=_announce,
        )
        await worker.start()
        stack.push_async_callback(worker.stop, grace=False)
    while len(list(models.instances())) < WORKERS:
        await models.changed()
    return models


async def _converse(models: Models, chat: Chat, number: int, begun: float, answers: list[Answer]) -> None:
    """Run one chat from its beginning to its end."""
    await asyncio.sleep(begun + chat.begins - asyncio.get_running_loop().time())
    said = list(chat.opening)
    for count, turn in enumerate(chat.turns):
        await asyncio.sleep(turn.pause)
        said += turn.question
        request = PreprocessedRequest(
            model=_MODEL, token_ids=said.copy(), stop_conditions=StopConditions(max_tokens=turn.answer)
        )
        said += await _ask(models, request, f"{number}-{count}", str(number), answers)


async def _ask(
    models: Models, request: PreprocessedRequest, request_id: str, chat: str, answers: list[Answer]
) -> list[int]:
    """Return the tokens of the answer."""
    clock = asyncio.get_running_loop().time
    asked, first = clock(), None
    told: list[int] = []
    cached = 0
    stream = await models.get(_MODEL).generate(request, EngineContext(request_id), Principal(session=chat))
    try:
        async for item in stream:
            if item.token_ids:
                first = clock() if first is None else first
                told += item.token_ids
            if item.completion_usage is not None:
                cached = item.completion_usage.cached_tokens or 0
        worker = stream.instance_id or 0
    finally:
        await stream.aclose()
    answers.append(Answer(asked, (clock() if first is None else first) - asked, worker, len(request.token_ids), cached))
    return told


def _announce(_: str, **__: Any) -> None:
    """Tell no listener of workers that come and go."""
