"""Frontends that break a promise each, for the kit that must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from aiohttp import web
from dynamo_core import (
    DynamoError,
    EngineContext,
    Frontend,
    FrontendServices,
    HttpFault,
    HttpRoute,
    InflightRequest,
    PluginConfig,
    PreprocessedRequest,
    Principal,
    ServedModel,
    Tokenizer,
    TokenStream,
)
from dynamo_core.errors import ModelNotFound
from dynamo_core.protocol import Unreadable, read
from dynamo_http import principal_of
from dynamo_testing.frontend_kit import Asked, FrontendFactory, FrontendKit
from dynamo_text import ByteTokenizer, load_tokenizer


class Ask(msgspec.Struct):
    model: str
    prompt: str
    stream: bool = False


class Sound(Frontend):
    """Keeps every promise."""

    NAME = "sound"

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("POST", "/generate", self.generate, "Continue a prompt.")]

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        return load_tokenizer(kind, files)

    def read(self, body: bytes) -> Ask:
        try:
            return read(msgspec.json.Decoder(Ask), body)
        except Unreadable as error:
            raise HttpFault(400, str(error)) from error

    def model(self, name: str, principal: Principal) -> ServedModel:
        if not principal.allows(name):
            raise ModelNotFound("there is no such model")
        return self.services.models.get(name)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        principal = principal_of(http)
        ask = self.read(await http.read())
        model = self.model(ask.model, principal)
        with self.services.requests.begin(
            model=model.name, endpoint="generate", streaming=ask.stream, headers={}, principal=principal
        ) as inflight:
            try:
                return await self.answer(http, model, ask, inflight)
            except DynamoError as error:
                return self.failed(error, inflight)

    def failed(self, error: DynamoError, inflight: InflightRequest) -> web.StreamResponse:
        problem = self.services.problem_of(error)
        inflight.fail(problem.metric, problem.status)
        raise error

    def prompt(self, ask: Ask) -> str:
        return ask.prompt

    async def answer(
        self, http: web.Request, model: ServedModel, ask: Ask, inflight: InflightRequest
    ) -> web.StreamResponse:
        tokens = model.tokenizer.encode(self.prompt(ask))
        inflight.prompt_tokens(len(tokens))
        request = PreprocessedRequest(model=model.name, token_ids=tokens)
        stream = await model.generate(request, EngineContext(inflight.request_id), principal_of(http))
        inflight.routed(stream.instance_id)
        try:
            return await (self.streamed(http, stream, inflight) if ask.stream else self.whole(stream, inflight))
        finally:
            await stream.aclose()

    async def whole(self, stream: TokenStream, inflight: InflightRequest) -> web.StreamResponse:
        text = b""
        async for item in stream:
            inflight.output(len(item.token_ids))
            text += bytes(item.token_ids)
        inflight.succeed("stop")
        return web.Response(body=text)

    async def streamed(self, http: web.Request, stream: TokenStream, inflight: InflightRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        async for item in stream:
            inflight.output(len(item.token_ids))
            await response.write(bytes(item.token_ids))
        inflight.succeed("stop")
        return response


class _Kit(FrontendKit):
    FAILS: ClassVar[tuple[str, ...]] = ()
    PATIENCE = (0.5, 10.0)
    FRONTEND: ClassVar[type[Sound]] = Sound

    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        def made(services: FrontendServices) -> Frontend:
            return self.FRONTEND(PluginConfig(), services)

        return made

    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/generate", {"model": model, "prompt": prompt})

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/generate", {"model": model, "prompt": prompt, "stream": True})


class TestSound(_Kit):
    pass


class TestUnnamedRoute(_Kit):
    FAILS = ("test_its_routes_are_sound_and_each_is_there_once",)

    class FRONTEND(Sound):
        def routes(self) -> Iterable[HttpRoute]:
            return [HttpRoute("POST", "/generate", self.generate)]


class TestRunsOn(_Kit):
    FAILS = ("test_it_can_be_closed_twice_and_without_a_start",)

    class FRONTEND(Sound):
        async def start(self) -> None:
            self.task = asyncio.ensure_future(asyncio.sleep(60))


class _Shifted(ByteTokenizer):
    """Each byte is the token after its own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [(token + 1) % 256 for token in super().encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode([(token - 1) % 256 for token in token_ids], skip_special_tokens=skip_special_tokens)


class TestOtherTokens(_Kit):
    FAILS = ("test_bytes_are_the_tokens_of_a_model_without_files",)

    class FRONTEND(Sound):
        def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
            return _Shifted() if kind == "bytes" else super().load_tokenizer(kind, files)


class TestTakesAnyTokenizer(_Kit):
    FAILS = ("test_a_tokenizer_that_cannot_be_made_is_told_as_such",)

    class FRONTEND(Sound):
        def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
            return ByteTokenizer()


class TestOtherPrompt(_Kit):
    FAILS = ("test_a_prompt_reaches_its_model_and_the_answer_its_client",)

    class FRONTEND(Sound):
        def prompt(self, ask: Ask) -> str:
            return ask.prompt[::-1]


class TestNeverSucceeds(_Kit):
    FAILS = ("test_an_answered_request_is_recorded_once_and_its_stream_closed",)

    class FRONTEND(Sound):
        async def whole(self, stream: TokenStream, inflight: InflightRequest) -> web.StreamResponse:
            return web.Response(body=b"".join([bytes(item.token_ids) async for item in stream]))


class TestMixesRequests(_Kit):
    FAILS = ("test_requests_side_by_side_do_not_mix",)

    class FRONTEND(Sound):
        last: Any = None

        async def answer(
            self, http: web.Request, model: ServedModel, ask: Ask, inflight: InflightRequest
        ) -> web.StreamResponse:
            self.last = model
            await asyncio.sleep(0.05)
            return await super().answer(http, self.last, ask, inflight)


class TestOneStatusForAll(_Kit):
    FAILS = ("test_an_error_has_the_status_that_the_table_of_core_gives",)

    class FRONTEND(Sound):
        def failed(self, error: DynamoError, inflight: InflightRequest) -> web.StreamResponse:
            inflight.fail("internal", 500)
            return web.Response(status=500)


class TestHalfAnAnswer(_Kit):
    FAILS = ("test_a_failure_in_mid_answer_is_no_answer",)

    class FRONTEND(Sound):
        async def whole(self, stream: TokenStream, inflight: InflightRequest) -> web.StreamResponse:
            text = b""
            try:
                async for item in stream:
                    inflight.output(len(item.token_ids))
                    text += bytes(item.token_ids)
            except DynamoError:
                text += b"..."
            inflight.succeed("stop")
            return web.Response(body=text)


class TestOtherStatusForModels(_Kit):
    FAILS = ("test_a_model_that_is_not_there_is_not_found",)

    class FRONTEND(Sound):
        def model(self, name: str, principal: Principal) -> ServedModel:
            if name not in {model.name for model in self.services.models.list()}:
                raise HttpFault(400, "there is no such model")
            return super().model(name, principal)


class TestAnyKeyForAnyModel(_Kit):
    FAILS = ("test_a_model_that_the_key_does_not_cover_does_not_exist",)

    class FRONTEND(Sound):
        def model(self, name: str, principal: Principal) -> ServedModel:
            return self.services.models.get(name)


class TestTripsOverBodies(_Kit):
    FAILS = ("test_a_body_that_is_no_request_is_the_clients_error",)

    class FRONTEND(Sound):
        def read(self, body: bytes) -> Ask:
            return msgspec.json.decode(body, type=Ask)


class _Deaf(Sound):
    """Goes on when its client has left, for streams or for whole answers."""

    STREAMS: ClassVar[bool] = False

    async def answer(
        self, http: web.Request, model: ServedModel, ask: Ask, inflight: InflightRequest
    ) -> web.StreamResponse:
        answering = super().answer(http, model, ask, inflight)
        return await (asyncio.shield(answering) if ask.stream is self.STREAMS else answering)

    async def streamed(self, http: web.Request, stream: TokenStream, inflight: InflightRequest) -> web.StreamResponse:
        try:
            return await super().streamed(http, stream, inflight)
        except ConnectionError:
            await asyncio.sleep(60)
            raise


class TestAnswersOn(_Kit):
    FAILS = ("test_a_client_that_leaves_ends_its_request",)

    class FRONTEND(_Deaf):
        pass


class TestStreamsOn(_Kit):
    FAILS = ("test_a_client_that_leaves_a_stream_ends_its_request",)

    class FRONTEND(_Deaf):
        STREAMS = True


class TestCollectsStreams(_Kit):
    FAILS = (
        "test_a_stream_is_sent_as_it_is_made",
        "test_a_client_that_leaves_a_stream_ends_its_request",
    )

    class FRONTEND(Sound):
        async def streamed(
            self, http: web.Request, stream: TokenStream, inflight: InflightRequest
        ) -> web.StreamResponse:
            return await self.whole(stream, inflight)
