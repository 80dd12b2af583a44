"""The calls to engines for one client request, and the streams of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_core import MULTI_CHOICE, EngineContext, SharedPermit
from dynamo_core.errors import NotSupported
from dynamo_text import compile_stops

from dynamo_generation.answers.answer import close_all
from dynamo_generation.answers.engine_stream_slices import COALESCE, ScoredSource, Source, coalesced
from dynamo_generation.choices.choice import Choice
from dynamo_generation.endpoints.answer_size import check_answer_size
from dynamo_generation.endpoints.endpoint import Exchange
from dynamo_generation.endpoints.parsed_request import ParsedRequest
from dynamo_generation.prompts.preprocess import Prompt, to_engine

if TYPE_CHECKING:
    from dynamo_core import PreprocessedRequest, ServedModel, TaskSet, TokenStream

    from dynamo_generation.answers.loop_scheduler import LoopScheduler


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """The calls of one request, and the choices that the items of each belong to, by the items' index."""

    asked: Sequence[PreprocessedRequest]
    choices: Sequence[dict[int, Choice]]
    #: Log-probabilities of each token; 0 if none are shown, or the engine has put them into the API's form.
    scores: int
    #: Items that may gather before they are read.
    coalesce: int | None

    def sources(self, streams: Sequence[TokenStream], turns: LoopScheduler) -> list[Source]:
        """Return the streams of the calls as what an answer is read from."""
        pairs = zip(streams, self.choices, strict=True)
        if not self.scores:
            return [Source(stream, mapping) for stream, mapping in pairs]
        return [ScoredSource(stream, mapping, turns, self.scores) for stream, mapping in pairs]


async def plan_calls(parsed: ParsedRequest, prompts: Sequence[Prompt], model: ServedModel, largest: int) -> EngineCalls:
    """Return one call per choice; one for everything, where an engine takes text and makes several choices.

    `largest` is the most bytes that a whole answer may have.

    Raises:
        NotSupported: the engine cannot choose the best of several answers.
        InvalidArgument: the whole answer could be too large.
    """
    request, in_text = parsed.request, takes_text(model)
    if in_text:
        asked, choices = _calls_in_text(parsed, prompts, model)
        made = request.choices
    else:
        asked, choices = await _calls_in_tokens(parsed, prompts, model)
        made = request.candidates
    share = sum(len(mapping) for mapping in choices) // len(prompts)
    for mapping in choices:
        for choice in mapping.values():
            choice.prompt = choice.index // share
            choice.prompt_tokens = len(prompts[choice.prompt].token_ids)
    scores = 0
    alternatives = asked[0].output_options.logprobs
    if alternatives is not None:
        scores = 0 if in_text else 1 + alternatives
        most = sum(item.stop_conditions.max_tokens or 0 for item in asked) * (made * len(prompts) // len(asked))
        if not request.streaming:
            check_answer_size(request, most, largest)
    coalesce: int | None = None
    if not request.streaming and all(choice.patient for mapping in choices for choice in mapping.values()):
        # The client gets nothing of the answer before its end.
        coalesce = coalesced(scores) if scores else COALESCE
    return EngineCalls(asked, choices, scores, coalesce)


def _calls_in_text(
    parsed: ParsedRequest, prompts: Sequence[Prompt], model: ServedModel
) -> tuple[list[PreprocessedRequest], list[dict[int, Choice]]]:
    request, n = parsed.request, parsed.request.choices
    if MULTI_CHOICE in model.card.capabilities or request.candidates * len(prompts) == 1:
        # The tokens only tell the router how much is coming.
        tokens = [token for prompt in prompts for token in prompt.token_ids]
        asked = to_engine(request, Prompt(tokens), model, body=parsed.raw)
        # How many choices the worker has to wait for.
        asked.sampling_options.n = n * len(prompts)
        return [asked], [{index: Choice(index) for index in range(n * len(prompts))}]
    if request.candidates > n:
        raise NotSupported("best_of needs an engine that chooses itself, which that of this model does not")
    each = [(prompt, at) for prompt in range(len(prompts)) for at in range(n)]
    calls = [
        to_engine(request, prompts[prompt], model, choice=at, body=parsed.body_of_one(prompt, at))
        for prompt, at in each
    ]
    return calls, [{0: Choice(index)} for index in range(len(each))]


async def _calls_in_tokens(
    parsed: ParsedRequest, prompts: Sequence[Prompt], model: ServedModel
) -> tuple[list[PreprocessedRequest], list[dict[int, Choice]]]:
    request, made = parsed.request, parsed.request.candidates
    asked = [to_engine(request, prompt, model, choice=at) for prompt in prompts for at in range(made)]
    given = asked[0].stop_conditions.stop
    stops = await compile_stops(given) if given else None
    return asked, [
        {0: parsed.choice(index, item, prompts[index // made], model, stops)} for index, item in enumerate(asked)
    ]


async def start_calls(calls: EngineCalls, exchange: Exchange, tasks: TaskSet) -> Sequence[TokenStream]:
    """Start all calls, or none; return their streams, which the caller closes."""
    if calls.coalesce is not None:
        exchange.ctx.coalesce = calls.coalesce
    if len(calls.asked) == 1:
        streams: Sequence[TokenStream] = [
            await exchange.model.generate(calls.asked[0], exchange.ctx, exchange.principal)
        ]
    else:
        streams = await _start_several(calls.asked, exchange, tasks)
    exchange.inflight.routed(streams[0].instance_id)
    return streams


async def _start_several(
    asked: Sequence[PreprocessedRequest], exchange: Exchange, tasks: TaskSet
) -> Sequence[TokenStream]:
    model, ctx, principal = exchange.model, exchange.ctx, exchange.principal
    started: dict[int, TokenStream] = {}
    # The client has asked for one thing: all of it is let in, or nothing.
    permit = SharedPermit(await model.admit(asked[0], principal), len(asked))

    async def start(index: int) -> None:
        child = EngineContext(f"{ctx.id}-c{index}", metadata=ctx.metadata, root_id=ctx.id)
        child.coalesce = ctx.coalesce
        ctx.link_child(child)
        started[index] = await model.generate(asked[index], child, principal, permit)

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(asked)):
                group.create_task(start(index))
    except BaseException as error:
        # All or none: what did start is given back.
        try:
            await asyncio.shield(tasks.spawn(close_all(list(started.values())), name="close-started"))
        finally:
            permit.end()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from error
        raise
    return [started[index] for index in range(len(asked))]


def takes_text(model: ServedModel) -> bool:
    """Return whether the engine takes the client's body, and counts its own tokens."""
    return model.card.model_input == "text"
