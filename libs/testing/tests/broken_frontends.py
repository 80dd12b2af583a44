"""Frontends that break a promise each, for the kit that must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from aiohttp import web
from dynamo_core import (
    DynamoError,
    EngineContext,
    Frontend,
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

from libs.testing.tests.planted import Planted, leave_running, mutant, then


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


class _Kit(Planted, FrontendKit):
    PART = Sound
    PATIENCE = (0.5, 10.0)

    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: self.PART(PluginConfig(), services)

    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/generate", {"model": model, "prompt": prompt})

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/generate", {"model": model, "prompt": prompt, "stream": True})


class TestSound(_Kit):
    pass


TestUnnamedRoute = _Kit.failing(
    "test_its_routes_are_sound_and_each_is_there_once",
    routes=lambda real, self: [HttpRoute("POST", "/generate", self.generate)],
)


TestRunsOn = _Kit.failing(
    "test_the_frontend_can_be_closed_twice_and_without_a_start",
    start=then(leave_running),
)


#: Each byte is the token after its own.
Shifted = mutant(
    ByteTokenizer,
    encode=lambda real, self, text, **named: [(token + 1) % 256 for token in real(text, **named)],
    decode=lambda real, self, tokens, **named: real([(token - 1) % 256 for token in tokens], **named),
)


TestOtherTokens = _Kit.failing(
    "test_bytes_are_the_tokens_of_a_model_without_files",
    load_tokenizer=lambda real, self, kind, files: Shifted() if kind == "bytes" else real(kind, files),
)


TestTakesAnyTokenizer = _Kit.failing(
    "test_an_unloadable_tokenizer_is_a_config_error",
    load_tokenizer=lambda real, self, kind, files: ByteTokenizer(),
)


TestOtherPrompt = _Kit.failing(
    "test_a_prompt_reaches_its_model_and_the_answer_its_client", prompt=lambda real, self, ask: ask.prompt[::-1]
)


async def _never_succeeds(real: Any, self: Any, stream: Any, inflight: Any) -> Any:
    return web.Response(body=b"".join([bytes(item.token_ids) async for item in stream]))


TestNeverSucceeds = _Kit.failing(
    "test_an_answered_request_is_recorded_once_and_its_stream_closed", whole=_never_succeeds
)


async def _mixes_requests(real: Any, self: Any, http: Any, model: Any, ask: Any, inflight: Any) -> Any:
    self.last = model
    await asyncio.sleep(0.05)
    return await real(http, self.last, ask, inflight)


TestMixesRequests = _Kit.failing("test_requests_side_by_side_do_not_mix", last=None, answer=_mixes_requests)


TestOneStatusForAll = _Kit.failing(
    "test_an_error_has_the_status_of_cores_table",
    failed=lambda real, self, error, inflight: (inflight.fail("internal", 500), web.Response(status=500))[1],
)


async def _half_an_answer(real: Any, self: Any, stream: Any, inflight: Any) -> Any:
    text = b""
    try:
        async for item in stream:
            inflight.output(len(item.token_ids))
            text += bytes(item.token_ids)
    except DynamoError:
        text += b"..."
    inflight.succeed("stop")
    return web.Response(body=text)


TestHalfAnAnswer = _Kit.failing("test_a_failure_in_mid_answer_is_no_answer", whole=_half_an_answer)


def _other_status_for_models(real: Any, self: Any, name: Any, principal: Any) -> Any:
    if name not in {model.name for model in self.services.models.list()}:
        raise HttpFault(400, "there is no such model")
    return real(name, principal)


TestOtherStatusForModels = _Kit.failing("test_a_model_that_is_not_there_is_not_found", model=_other_status_for_models)


TestAnyKeyForAnyModel = _Kit.failing(
    "test_a_model_that_the_key_does_not_cover_does_not_exist",
    model=lambda real, self, name, principal: self.services.models.get(name),
)


TestTripsOverBodies = _Kit.failing(
    "test_a_body_that_is_no_request_is_the_clients_error",
    read=lambda real, self, body: msgspec.json.decode(body, type=Ask),
)


async def streams_on(real: Any, self: Any, *answer: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await real(*answer)
    except ConnectionError:
        await asyncio.sleep(60)
        raise
    return response


class _Deaf(_Kit):
    """Over one that goes on when its client has left, for streams or for whole answers."""

    PART = mutant(
        Sound,
        STREAMS=False,
        answer=lambda real, self, http, model, ask, inflight: (
            asyncio.shield(real(http, model, ask, inflight))
            if ask.stream is self.STREAMS
            else real(http, model, ask, inflight)
        ),
        streamed=streams_on,
    )


TestAnswersOn = _Deaf.failing("test_a_client_that_leaves_ends_its_request")
TestStreamsOn = _Deaf.failing("test_a_client_that_leaves_a_stream_ends_its_request", STREAMS=True)
TestCollectsStreams = _Kit.failing(
    "test_a_stream_is_sent_as_it_is_made",
    "test_a_client_that_leaves_a_stream_ends_its_request",
    streamed=lambda real, self, http, stream, inflight: self.whole(stream, inflight),
)
