"""Checks of an engine's answers: alone, side by side, within limits, and as vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import msgspec
from dynamo_core.contracts.engine import EMBED, PROGRESS, RERANK, SCORE, DisaggregationMode, LLMEngine
from dynamo_core.contracts.engine_boundary import call_async
from dynamo_core.contracts.requests.context import GenerateContext
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest

from dynamo_testing.engine.bench import Bench, Skipped
from dynamo_testing.engine.bounded_calls import told, within
from dynamo_testing.engine.failures import (
    AnswerRepeated,
    ConcurrentGenerateFailed,
    ConformanceFailure,
    EmbeddingFailed,
    HealthCheckPayloadFailed,
    MaxTokensExceeded,
    ProgressFailed,
    RequestsMixed,
    ScoringFailed,
    WrongUsage,
)
from dynamo_testing.engine.streams import Reading, counted

#: Streams that are open at the same time.
STREAMS = 8
#: Kinds of requests among them: each is a token longer, and has a limit that is higher by one, than the one before.
SHAPES = 4
#: The limit of the request that has one.
FEW_TOKENS = 2
#: How far two scores of the same pair may be apart, since batches are not computed alike.
_NOISE = 0.01


async def generate(bench: Bench) -> str:
    """Check that a plain request is answered, and the last item and no other is the terminal."""
    await bench.running()
    return bench.check(await _ask(bench, await bench.request()))


async def max_tokens(bench: Bench) -> str:
    """Check that no more tokens come than the request allows."""
    await bench.running()
    request = await bench.request(max_tokens=FEW_TOKENS)
    reading = await _ask(bench, request)
    seen = bench.check(reading)
    _check_number(reading, request)
    return seen


async def health_check_payload(bench: Bench) -> str:
    """Check that the engine's own probe, if any, is a request that it answers."""
    engine, config = await bench.running()
    try:
        payload = await within(call_async(engine, "health_check_payload"), bench.plan.request_timeout)
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
        # A probe is passed on to no other worker, whatever the role.
        return bench.check(await _ask(bench, request), DisaggregationMode.AGGREGATED)
    except ConformanceFailure as failure:
        raise HealthCheckPayloadFailed(f"the probe was not answered: {failure.name}: {failure.seen}") from failure


async def concurrent(bench: Bench) -> str:
    """Check that streams that are open at the same time end as they would alone."""
    engine, config = await bench.running()
    shapes = list(_shapes(config.context_length, len(bench.plan.token_ids), longer=bench.any_prompt))
    alone: list[Reading | None] = []
    for shape in shapes:
        alone.append(await _alone(bench, shape))
        if alone[-1] is None:
            break
    readings = [Reading() for _ in range(STREAMS)]
    requests = [
        await bench.request(prompt=prompt, max_tokens=limit) for prompt, limit in islice(cycle(shapes), STREAMS)
    ]
    # Whether all of them were answered as they should be, one by one.
    known = None not in alone
    patience = bench.plan.request_timeout
    await asyncio.gather(
        *(
            reading.read(engine, request, bench.context(), patience)
            for reading, request in zip(readings, requests, strict=True)
        )
    )
    failures = []
    for reading, request in zip(readings, requests, strict=True):
        try:
            bench.check(reading)
            if known:
                _check_number(reading, request)
        except ConformanceFailure as failure:
            failures.append(failure)
    if failures:
        first = failures[0]
        mixed = known and isinstance(first, WrongUsage | MaxTokensExceeded | AnswerRepeated)
        raise (RequestsMixed if mixed else ConcurrentGenerateFailed)(
            f"{len(failures)} of {STREAMS} streams failed, the first so: {first.name}: {first.seen}"
        ) from first
    if known:
        _compare(readings, requests, alone)
    return f"{STREAMS} streams, {sum(reading.tokens for reading in readings)} tokens"


def _shapes(context: int | None, prompt: int, *, longer: bool) -> Iterator[tuple[int, int]]:
    """Yield lengths of prompts and limits that tell one request from another, as far as the context has room."""
    for more in range(SHAPES):
        length, limit = prompt + more * longer, FEW_TOKENS + more
        if more and context is not None and length + limit > context:
            return
        yield length, limit


async def _alone(bench: Bench, shape: tuple[int, int]) -> Reading | None:
    """Return the answer to such a request.

    None if it cannot be told in advance: it failed, or is another the second time.
    """
    requests = [await bench.request(prompt=shape[0], max_tokens=shape[1], ignore_eos=True) for _ in range(2)]
    readings = [await _ask(bench, request) for request in requests]
    try:
        for reading, request in zip(readings, requests, strict=True):
            bench.check(reading)
            _check_number(reading, request)
    except ConformanceFailure:
        # Found by the checks of single answers, or by what follows.
        return None
    one, other = readings
    return one if _end(one) == _end(other) else None


def _end(reading: Reading) -> tuple[int, FinishReason | None]:
    return reading.tokens, reading.items[-1].finish_reason


def _compare(readings: list[Reading], requests: list[PreprocessedRequest], alone: list[Reading | None]) -> None:
    """Refuse answers that are other ones than those to the same requests alone.

    An engine that computes in batches may answer a little differently; one whose requests share their state does so
    throughout.
    """
    others = []
    for reading, request, before in zip(readings, requests, cycle(alone), strict=False):
        assert before is not None
        if _end(reading) != _end(before):
            raise RequestsMixed(
                f"a prompt of {len(request.token_ids)} tokens, of which {request.stop_conditions.max_tokens} may come "
                f"out, got {_told(reading)} beside {STREAMS - 1} others, and {_told(before)} alone{reading.method}"
            )
        others.append(reading.token_ids != before.token_ids)
    if sum(others) > len(others) / 2:
        raise RequestsMixed(
            f"{sum(others)} of {STREAMS} answers have other tokens than those to the same requests alone"
            f"{readings[0].method}"
        )


def _told(reading: Reading) -> str:
    tokens, reason = _end(reading)
    return f"{counted(tokens, 'token')} and {str(reason)!r}"


def _check_number(reading: Reading, request: PreprocessedRequest) -> None:
    allowed = request.stop_conditions.max_tokens
    if allowed is None or reading.tokens <= allowed:
        return
    seen = f"{reading.tokens} tokens came, max_tokens was {allowed}"
    if reading.repeated:
        raise AnswerRepeated(f"the tokens that had come were sent again, and {seen}{reading.repeated}")
    raise MaxTokensExceeded(f"{seen}{reading.place}")


async def progress(bench: Bench) -> str:
    """Check that an engine that declares progress has made some when it has answered."""
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
    """Check that an engine that declares embeddings makes one vector per input."""
    engine, config = await bench.running()
    if EMBED not in config.capabilities:
        raise Skipped(f"the capability {EMBED!r} is not declared")
    inputs = [list(bench.plan.token_ids), list(bench.plan.token_ids)[:1]]
    request = EmbedRequest(model=config.model, token_ids=inputs)
    try:
        output = await within(
            call_async(engine, "embed", request, GenerateContext(bench.context())), bench.plan.request_timeout
        )
    except Exception as error:
        raise EmbeddingFailed(f"embed {told(error)}") from error
    fault = _fault_of(output, inputs)
    if fault:
        raise EmbeddingFailed(fault)
    return f"{len(inputs)} vectors of {len(output.embeddings[0])} numbers"


async def score(bench: Bench) -> str:
    """Check that an engine that declares scores makes one per document, for one query and, with `SCORE`, for pairs."""
    engine, config = await bench.running()
    if not config.capabilities & {SCORE, RERANK}:
        raise Skipped(f"neither capability {SCORE!r} nor {RERANK!r} is declared")
    documents = ["Rain falls from clouds.", "A hen lays eggs.", "Rain falls from clouds."]
    queries = [["Where does rain come from?"]]
    if SCORE in config.capabilities:
        queries.append(["Where does rain come from?", "What do hens lay?", "Where does rain come from?"])
    for asked in queries:
        request = ScoreRequest(model=config.model, queries=asked, documents=documents)
        try:
            output = await within(
                call_async(engine, "score", request, GenerateContext(bench.context())), bench.plan.request_timeout
            )
        except Exception as error:
            raise ScoringFailed(f"score {told(error)}") from error
        fault = _scoring_fault(output, len(documents))
        if fault:
            raise ScoringFailed(fault)
    return f"{len(documents)} scores for {' and for '.join(f'{len(each)} queries' for each in queries)}"


def _scoring_fault(output: Any, documents: int) -> str:
    if not isinstance(output, ScoreOutput):
        return f"score returned a {type(output).__name__}, not ScoreOutput"
    made = output.scores
    if len(made) != documents:
        return f"score returned {len(made)} scores for {documents} documents"
    if not all(map(math.isfinite, made)):
        return f"not all scores are finite numbers: {made}"
    if not math.isclose(made[0], made[2], rel_tol=_NOISE, abs_tol=_NOISE):
        return f"the first and the last pair are the same, and their scores are {made[0]} and {made[2]}"
    if output.prompt_tokens < documents:
        return f"prompt_tokens is {output.prompt_tokens} for {documents} pairs of texts"
    return ""


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
