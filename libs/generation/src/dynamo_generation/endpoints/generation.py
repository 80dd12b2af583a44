"""Requests that generate: started at one or several engines, answered with events or with one body."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from aiohttp import web
from dynamo_core import MULTI_CHOICE, EngineContext, SharedPermit
from dynamo_core.errors import NotSupported
from dynamo_text import StopStrings, compile_stops

from dynamo_generation.answers.annotations import as_events, closing, opening, single, unary_extension
from dynamo_generation.answers.answer import Answer, close_all
from dynamo_generation.answers.answering import Answering
from dynamo_generation.answers.continuous_usage import ContinuousUsage
from dynamo_generation.answers.framing import EVENTS, Framing
from dynamo_generation.answers.render import DONE, BodyRenderer, ChunkRenderer, Collected, Identity, Pieces
from dynamo_generation.answers.render_token_ids import Inner, TokenIds
from dynamo_generation.answers.source import COALESCE, ScoredSource, Source, coalesced
from dynamo_generation.answers.sse import EventStream
from dynamo_generation.answers.streaming import StreamingAnswer
from dynamo_generation.answers.unary import UnaryAnswer
from dynamo_generation.answers.usage import cached_of, usage_of
from dynamo_generation.choices.choice import Choice, TokenChoice
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.prompts.meters import PromptMeters
from dynamo_generation.prompts.preprocess import Prompt, to_engine
from dynamo_generation.requests import end_user
from dynamo_generation.requests.answer_size import check_answer_size
from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.completions import CompletionRequest
from dynamo_generation.requests.ignored import IgnoredFields

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ServedModel, TokenStream


class Renderer(ChunkRenderer, BodyRenderer, Protocol):
    """Makes both forms of an answer."""

    def extension(self, values: dict[str, Any]) -> bytes:
        """A chunk without choices whose `nvext` holds annotations; empty if there are none."""


class ParsedRequest(ABC):
    """A checked body of one kind: what differs between chat and text completions."""

    def __init__(self, raw: dict[str, Any], request: ChatRequest | CompletionRequest) -> None:
        self.raw = raw
        self.request = request
        #: Parts of the client's body that are left out, and of which it is told.
        self.ignored: Sequence[str] = ()

    @abstractmethod
    def check_for_tokens(self) -> None:
        """Refuses what cannot be asked of an engine that takes tokens.

        Raises:
            InvalidArgument: naming the field.
        """

    def release_body(self) -> None:
        """Let go of the body but for its tools, of which parsers are made."""
        self.raw = {name: self.raw[name] for name in ("tools",) if name in self.raw}

    def body_of_one(self, prompt: int, choice: int) -> dict[str, Any]:
        """The body that asks for one answer to one of the prompts, both counted from 0."""
        body = {name: value for name, value in self.raw.items() if name not in ("n", "best_of")}
        if self.request.seed is not None:
            body["seed"] = self.request.seed + choice
        return body

    @abstractmethod
    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """The prompts as tokens.

        Raises:
            InvalidArgument: naming the field.
        """

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: Prompt, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """What reads one answer of an engine that gives tokens. May still change what the engine is asked."""
        return TokenChoice(index, request, model.tokenizer, stops)

    def kept(self, collected: Sequence[Collected], model: ServedModel) -> Sequence[Collected]:
        """Those of the whole answers that the client gets."""
        return collected

    def with_tokens(self, renderer: Inner, prompts: Sequence[Prompt], model: ServedModel, *, beside: bool) -> Renderer:
        """What writes the answer, with its tokens if the client wants them. An engine that takes text has none."""
        if not self.request.return_token_ids or model.card.model_input == "text":
            return renderer
        return TokenIds(renderer, [prompt.token_ids for prompt in prompts], beside=beside)

    @abstractmethod
    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """What writes the answer."""


ParsedT = TypeVar("ParsedT", bound=ParsedRequest)


class GenerationEndpoint(ModelEndpoint[ParsedT]):
    """A route that generates."""

    USER = end_user.USER
    SESSION = end_user.SESSION
    #: How the ids of answers begin.
    ID_PREFIX: ClassVar[str]
    #: What a stream ends with, after its last chunk.
    DONE: ClassVar[bytes] = DONE
    #: How the items of a stream are told apart.
    FRAMING: ClassVar[Framing] = EVENTS

    def __init__(self, services: FrontendServices, ignored: IgnoredFields, answering: Answering) -> None:
        super().__init__(services, ignored)
        self._tasks = answering.tasks
        self._write_buffer = answering.write_buffer
        self._memory = answering.memory
        self._turns = answering.turns
        self._checker = answering.checker
        self._usage_watch = answering.usage_watch
        self._meters = PromptMeters(services)

    async def serve(self, exchange: Exchange, parsed: ParsedT) -> web.StreamResponse:
        """Answers a request that generates."""
        model, inflight = exchange.model, exchange.inflight
        self._ignored.tell(exchange.http, parsed.ignored, self.ENDPOINT)
        if model.card.model_input != "text":
            parsed.check_for_tokens()
        model.precheck(exchange.principal)
        prompts = await parsed.prompts(model)
        self._meters.observe(prompts)
        inflight.prompt_tokens(sum(len(prompt.token_ids) for prompt in prompts))
        identity = Identity(f"{self.ID_PREFIX}{inflight.request_id}", int(time.time()), model.name)
        renderer = parsed.renderer(identity, prompts, model)
        if model.card.model_input != "text":
            parsed.release_body()
            await exchange.release_body()
        answer = Answer(await self._start(exchange, parsed, prompts), inflight, exchange.timing, self._tasks)
        await exchange.release_body()
        try:
            if parsed.request.streaming:
                return await self._stream(exchange, parsed, prompts, renderer, answer)
            # Sent before the streams are closed: the client need not wait for an engine to let go.
            body = await self._collect(exchange, parsed, prompts, renderer, answer)
            if isinstance(body, list):
                response = await self.send(exchange, body)
            else:
                response = await self.send_in_pieces(exchange, body)
            self._succeed(exchange, answer)
            return response
        finally:
            if answer.holding is not None:
                answer.holding.release()
            await answer.aclose()

    async def _stream(
        self, exchange: Exchange, parsed: ParsedT, prompts: Sequence[Prompt], renderer: Renderer, answer: Answer
    ) -> web.StreamResponse:
        model, request, wanted = exchange.model, parsed.request, parsed.request.annotations
        out = exchange.out = EventStream(
            exchange.http, stall=self.services.write_stall, high_water=self._write_buffer, framing=self.FRAMING
        )

        def usage() -> dict[str, Any]:
            return usage_of(answer.choices, engine_counts=_engine_counts(model))

        def told(values: dict[str, Any]) -> bytes:
            return renderer.extension(single(values)) if request.annotated_chunks else as_events(values)

        streaming = StreamingAnswer(
            answer,
            ContinuousUsage(renderer, usage) if request.continuous_usage else renderer,
            out,
            keep_alive=self.services.keep_alive,
            opening=told(opening(wanted, prompts, model.tokenizer.decode)),
            closing=lambda: told(closing(wanted, exchange.timing)),
            usage=usage if request.include_usage else None,
            check=self._checker.of(answer.choices, model.name, exchange.principal),
            done=self.DONE,
            seal=exchange.seal,
        )
        response = await streaming.run()
        self._succeed(exchange, answer)
        return response

    def _succeed(self, exchange: Exchange, answer: Answer) -> None:
        model = exchange.model
        exchange.inflight.succeed(answer.finish_reason, cached_of(answer.choices))
        self._usage_watch.look(answer.sources, model.name, engine_counts=_engine_counts(model))

    async def _collect(
        self,
        exchange: Exchange,
        parsed: ParsedT,
        prompts: Sequence[Prompt],
        renderer: Renderer,
        answer: Answer,
    ) -> Pieces:
        model = exchange.model
        collected = await UnaryAnswer(answer, renderer, self._memory).collect()
        check = self._checker.of(answer.choices, model.name, exchange.principal)
        if check is not None:
            await check()
        extension = unary_extension(parsed.request.annotations, prompts, exchange.timing, model.tokenizer.decode)
        usage = usage_of(answer.choices, engine_counts=_engine_counts(model))
        return renderer.body(parsed.kept(collected, model), usage, extension)

    async def _start(self, exchange: Exchange, parsed: ParsedT, prompts: Sequence[Prompt]) -> list[Source]:
        """Asks the engines, once per choice. Engines that take text and make several are asked once for everything."""
        model, request, n = exchange.model, parsed.request, parsed.request.choices
        choices: list[dict[int, Choice]]
        takes_text = model.card.model_input == "text"
        if takes_text and (MULTI_CHOICE in model.card.capabilities or request.candidates * len(prompts) == 1):
            # The tokens only tell the router how much is coming.
            tokens = [token for prompt in prompts for token in prompt.token_ids]
            asked = [to_engine(request, Prompt(tokens), model, body=parsed.raw)]
            # How many choices the worker has to wait for.
            asked[0].sampling_options.n = n * len(prompts)
            choices = [{index: Choice(index) for index in range(n * len(prompts))}]
            made = n
        elif takes_text:
            made = n
            if request.candidates > n:
                raise NotSupported("best_of needs an engine that chooses itself, which that of this model does not")
            each = [(prompt, at) for prompt in range(len(prompts)) for at in range(n)]
            asked = [
                to_engine(request, prompts[prompt], model, choice=at, body=parsed.body_of_one(prompt, at))
                for prompt, at in each
            ]
            choices = [{0: Choice(index)} for index in range(len(each))]
        else:
            made = request.candidates
            asked = [to_engine(request, prompt, model, choice=at) for prompt in prompts for at in range(made)]
            given = asked[0].stop_conditions.stop
            stops = await compile_stops(given) if given else None
            choices = [
                {0: parsed.choice(index, item, prompts[index // made], model, stops)}
                for index, item in enumerate(asked)
            ]
        share = sum(len(mapping) for mapping in choices) // len(prompts)
        for mapping in choices:
            for choice in mapping.values():
                choice.prompt = choice.index // share
                choice.prompt_tokens = len(prompts[choice.prompt].token_ids)
        scores = 0
        alternatives = asked[0].output_options.logprobs
        if alternatives is not None:
            scores = 0 if takes_text else 1 + alternatives
            most = sum(item.stop_conditions.max_tokens or 0 for item in asked) * (made * len(prompts) // len(asked))
            if not request.streaming:
                check_answer_size(request, most, self._memory.most)
        if not request.streaming and all(choice.patient for mapping in choices for choice in mapping.values()):
            # The client gets nothing of the answer before its end.
            exchange.ctx.coalesce = coalesced(scores) if scores else COALESCE
        streams = await self._generate(exchange, asked)
        exchange.inflight.routed(streams[0].instance_id)
        if not scores:
            return [Source(stream, mapping) for stream, mapping in zip(streams, choices, strict=True)]
        turns = self._turns
        return [ScoredSource(stream, mapping, turns, scores) for stream, mapping in zip(streams, choices, strict=True)]

    async def _generate(self, exchange: Exchange, asked: Sequence[PreprocessedRequest]) -> Sequence[TokenStream]:
        model, ctx, principal = exchange.model, exchange.ctx, exchange.principal
        if len(asked) == 1:
            return [await model.generate(asked[0], ctx, principal)]
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
                await asyncio.shield(self._tasks.spawn(close_all(list(started.values())), name="close-started"))
            finally:
                permit.end()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return [started[index] for index in range(len(asked))]


def _engine_counts(model: ServedModel) -> bool:
    return model.card.model_input == "text"
