"""Checks of what an engine answers: alone, side by side, within limits, and as vectors."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from dynamo_core.contracts.context import GenerateContext
from dynamo_core.contracts.engine import EMBED, PROGRESS, DisaggregationMode, LLMEngine
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest
from dynamo_core.testing.engine.bench import Bench, Skipped
from dynamo_core.testing.engine.deadline import call, told, within
from dynamo_core.testing.engine.failures import (
    ConcurrentGenerateFailed,
    ConformanceFailure,
    EmbeddingFailed,
    HealthCheckPayloadFailed,
    MaxTokensExceeded,
    ProgressFailed,
)
from dynamo_core.testing.engine.streams import Reading, check_answer

#: Streams that are open at the same time.
STREAMS = 8
#: The limit of the request that has one.
FEW_TOKENS = 2


async def generate(bench: Bench) -> str:
    """A plain request is answered, and the last item and no other is the terminal."""
    await bench.running()
    return check_answer(await _ask(bench, await bench.request()), bench.mode)


async def max_tokens(bench: Bench) -> str:
    """No more tokens come than the request allows."""
    await bench.running()
    request = await bench.request(max_tokens=FEW_TOKENS)
    reading = await _ask(bench, request)
    seen = check_answer(reading, bench.mode)
    allowed = request.stop_conditions.max_tokens
    if allowed is not None and reading.tokens > allowed:
        raise MaxTokensExceeded(f"{reading.tokens} tokens came, max_tokens was {allowed}")
    return seen


async def health_check_payload(bench: Bench) -> str:
    """The engine's own probe, if it has one, is a request that it answers."""
    engine, config = await bench.running()
    try:
        payload = await within(call(engine.health_check_payload), bench.plan.request_timeout)
        if payload is None:
            raise Skipped("the default one is used")
        # As the framework makes a probe of it.
        fields = {"model": config.model, "token_ids": [], **payload, "_HEALTH_CHECK": True}
        request = msgspec.convert(fields, PreprocessedRequest)
    except Skipped:
        raise
    except Exception as error:
        raise HealthCheckPayloadFailed(f"health_check_payload {told(error)}") from error
    try:
        # A probe is passed on to nobody, whatever the role.
        return check_answer(await _ask(bench, request), DisaggregationMode.AGGREGATED)
    except ConformanceFailure as failure:
        raise HealthCheckPayloadFailed(f"the probe was not answered: {failure.name}: {failure.seen}") from failure


async def concurrent(bench: Bench) -> str:
    """Streams that are open at the same time end as they would alone."""
    engine, _ = await bench.running()
    readings = [Reading() for _ in range(STREAMS)]
    requests = [await bench.request() for _ in readings]
    patience = bench.plan.request_timeout
    await asyncio.gather(
        *(
            reading.read(engine, request, bench.context(), patience)
            for reading, request in zip(readings, requests, strict=True)
        )
    )
    failures = []
    for reading in readings:
        try:
            check_answer(reading, bench.mode)
        except ConformanceFailure as failure:
            failures.append(failure)
    if failures:
        first = failures[0]
        raise ConcurrentGenerateFailed(
            f"{len(failures)} of {STREAMS} streams failed, the first so: {first.name}: {first.seen}"
        ) from first
    return f"{STREAMS} streams, {sum(reading.tokens for reading in readings)} tokens"


async def progress(bench: Bench) -> str:
    """An engine that declares that it reports progress has made some when it has answered."""
    engine, config = await bench.running()
    if PROGRESS not in config.capabilities:
        raise Skipped(f"the capability {PROGRESS!r} is not declared")
    before = _progress(engine)
    await _ask(bench, await bench.request(max_tokens=FEW_TOKENS))
    after = _progress(engine)
    if after <= before:
        raise ProgressFailed(f"progress was {before} before a request and {after} after it")
    return f"from {before} to {after}"


async def embed(bench: Bench) -> str:
    """An engine that declares embeddings makes one vector per input."""
    engine, config = await bench.running()
    if EMBED not in config.capabilities:
        raise Skipped(f"the capability {EMBED!r} is not declared")
    inputs = [list(bench.plan.token_ids), list(bench.plan.token_ids)[:1]]
    request = EmbedRequest(model=config.model, token_ids=inputs)
    try:
        output = await within(call(engine.embed, request, GenerateContext(bench.context())), bench.plan.request_timeout)
    except Exception as error:
        raise EmbeddingFailed(f"embed {told(error)}") from error
    fault = _fault_of(output, inputs)
    if fault:
        raise EmbeddingFailed(fault)
    return f"{len(inputs)} vectors of {len(output.embeddings[0])} numbers"


def _progress(engine: LLMEngine) -> int:
    try:
        made: object = engine.progress()
    except Exception as error:
        raise ProgressFailed(f"progress {told(error)}") from error
    if type(made) is not int:
        raise ProgressFailed(f"progress returned a {type(made).__name__}, not an int")
    return made


def _fault_of(output: Any, inputs: list[list[int]]) -> str:
    if not isinstance(output, EmbedOutput):
        return f"embed returned a {type(output).__name__}, not EmbedOutput"
    vectors, tokens = output.embeddings, sum(map(len, inputs))
    if len(vectors) != len(inputs):
        return f"embed returned {len(vectors)} vectors for {len(inputs)} inputs"
    lengths = {len(vector) for vector in vectors}
    if len(lengths) != 1 or 0 in lengths:
        return f"the vectors have the lengths {sorted(map(len, vectors))}"
    if not all(math.isfinite(number) for vector in vectors for number in vector):
        return "a vector holds a number that is not finite"
    if output.prompt_tokens < tokens:
        return f"prompt_tokens is {output.prompt_tokens} for inputs of {tokens} tokens"
    return ""


async def _ask(bench: Bench, request: PreprocessedRequest) -> Reading:
    engine, _ = await bench.running()
    reading = Reading()
    await reading.read(engine, request, bench.context(), bench.plan.request_timeout)
    return reading
