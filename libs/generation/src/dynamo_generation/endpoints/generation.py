"""Generating requests: start them at one or several engines, answer with events or one body."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aiohttp import web

from dynamo_generation.answers.annotations import as_events, leading_events, scalar, trailing_events, unary_extension
from dynamo_generation.answers.answer import Answer
from dynamo_generation.answers.answer_services import Answering
from dynamo_generation.answers.continuous_usage import ContinuousUsage
from dynamo_generation.answers.engine_stream_slices import Source
from dynamo_generation.answers.framing import EVENTS, Framing
from dynamo_generation.answers.render import DONE, Identity, Pieces
from dynamo_generation.answers.sse import EventStream
from dynamo_generation.answers.streaming import StreamingAnswer
from dynamo_generation.answers.unary import UnaryAnswer
from dynamo_generation.answers.usage import cached_of, usage_of
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.endpoints.engine_calls import plan_calls, start_calls, takes_text
from dynamo_generation.endpoints.parsed_request import ParsedRequest, Renderer
from dynamo_generation.prompts.preprocess import Prompt
from dynamo_generation.prompts.prompt_metrics import PromptMeters
from dynamo_generation.requests import end_user
from dynamo_generation.requests.ignored_fields import IgnoredFields

if TYPE_CHECKING:
    from dynamo_core import FrontendServices


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
        self._scheduler = answering.scheduler
        self._checker = answering.checker
        self._usage_watch = answering.usage_watch
        self._meters = PromptMeters(services)

    async def serve(self, exchange: Exchange, parsed: ParsedT) -> web.StreamResponse:
        """Answer a request that generates: prompts, what engines are asked, their streams, the answer."""
        prompts = await self._prompts(exchange, parsed)
        renderer = parsed.renderer(self._identity(exchange), prompts, exchange.model)
        if not takes_text(exchange.model):
            parsed.release_body()
            await exchange.release_body()
        sources = await self._start(exchange, parsed, prompts)
        await exchange.release_body()
        answer = Answer(sources, exchange.inflight, exchange.timing, self._tasks)
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

    async def _prompts(self, exchange: Exchange, parsed: ParsedT) -> list[Prompt]:
        """Return the prompts, unless the request is refused first: for what it asks, or before any work for load."""
        model = exchange.model
        self._ignored.report(exchange.http, parsed.ignored, self.ENDPOINT)
        if not takes_text(model):
            parsed.check_for_tokens()
        model.precheck(exchange.principal)
        prompts = await parsed.prompts(model)
        self._meters.observe(prompts)
        exchange.inflight.prompt_tokens(sum(len(prompt.token_ids) for prompt in prompts))
        return prompts

    async def _start(self, exchange: Exchange, parsed: ParsedT, prompts: Sequence[Prompt]) -> list[Source]:
        """Ask the engines. What they were asked is let go."""
        calls = await plan_calls(parsed, prompts, exchange.model, self._memory.most)
        return calls.sources(await start_calls(calls, exchange, self._tasks), self._scheduler)

    def _identity(self, exchange: Exchange) -> Identity:
        return Identity(f"{self.ID_PREFIX}{exchange.inflight.request_id}", int(time.time()), exchange.model.name)

    async def _stream(
        self, exchange: Exchange, parsed: ParsedT, prompts: Sequence[Prompt], renderer: Renderer, answer: Answer
    ) -> web.StreamResponse:
        model, request, wanted = exchange.model, parsed.request, parsed.request.annotations
        out = exchange.out = EventStream(
            exchange.http, stall=self.services.write_stall, high_water=self._write_buffer, framing=self.FRAMING
        )

        def usage() -> dict[str, Any]:
            return usage_of(answer.choices, engine_counts=takes_text(model))

        def told(values: dict[str, Any]) -> bytes:
            return renderer.extension(scalar(values)) if request.annotated_chunks else as_events(values)

        streaming = StreamingAnswer(
            answer,
            ContinuousUsage(renderer, usage) if request.continuous_usage else renderer,
            out,
            keep_alive=self.services.keep_alive,
            opening=told(leading_events(wanted, prompts, model.tokenizer.decode)),
            closing=lambda: told(trailing_events(wanted, exchange.timing)),
            usage=usage if request.include_usage else None,
            check=self._checker.of(answer.choices, model.name, exchange.principal),
            done=self.DONE,
            finalize=exchange.finalize,
        )
        response = await streaming.run()
        self._succeed(exchange, answer)
        return response

    def _succeed(self, exchange: Exchange, answer: Answer) -> None:
        model = exchange.model
        exchange.inflight.succeed(answer.finish_reason, cached_of(answer.choices))
        self._usage_watch.look(answer.sources, model.name, engine_counts=takes_text(model))

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
        usage = usage_of(answer.choices, engine_counts=takes_text(model))
        return renderer.body(parsed.best_of(collected, model), usage, extension)
