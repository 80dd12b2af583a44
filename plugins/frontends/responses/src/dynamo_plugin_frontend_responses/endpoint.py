"""``POST /v1/responses`` and its ``/input_tokens``: the Responses API, with or without a memory of earlier requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web
from dynamo_core.protocol import CHAT
from dynamo_generation.answers.answer import Answer
from dynamo_generation.answers.render import Identity, Pieces, encode
from dynamo_generation.bodies.reading import Body, run_for_size
from dynamo_generation.endpoints.conversation import ChatDependencies, ConversationEndpoint
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.endpoints.parsed_request import Renderer
from dynamo_generation.endpoints.token_count_route import CountingEndpoint
from dynamo_generation.endpoints.translated_request import TranslatedRequest
from dynamo_generation.prompts.preprocess import Prompt
from dynamo_generation.requests import end_user
from dynamo_http import principal_of

from dynamo_plugin_frontend_responses.memory import RecalledInput, ResponseMemory
from dynamo_plugin_frontend_responses.render import ID_PREFIX, ResponseRenderer
from dynamo_plugin_frontend_responses.requests import (
    ENCRYPTED_REASONING,
    INPUT_TOKENS_PASSIVE,
    REMEMBERED_INPUT_TOKENS_PASSIVE,
    REMEMBERED_RESPONSES_PASSIVE,
    RESPONSES_PASSIVE,
    InputTokensRequest,
    RememberedInputTokens,
    RememberedRequest,
    ResponsesRequest,
    parse_responses,
)
from dynamo_plugin_frontend_responses.to_chat import NAMES, chat_of_response
from dynamo_plugin_frontend_responses.tools import ResponseTools

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, ServedModel
    from dynamo_generation.answers.answer_services import Answering
    from dynamo_generation.requests.ignored_fields import IgnoredFields


class ParsedResponse(TranslatedRequest):
    """A checked request of the Responses API; `raw` is its body."""

    NAMES = NAMES

    def __init__(
        self,
        request: InputTokensRequest,
        raw: dict[str, Any],
        chats: ChatDependencies,
        recalled: RecalledInput | None = None,
    ) -> None:
        self.recalled = recalled
        self._tools = ResponseTools.of(request.tools or ())
        super().__init__(chat_of_response(request, self._tools), chats)
        self.ignored = self._tools.left_out
        self._echo = _echo(raw) | ({} if recalled is None else _stored_echo(raw, recalled))
        self._packs_reasoning = ENCRYPTED_REASONING in (raw.get("include") or ())

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> ResponseRenderer:
        """Return events and bodies of the Responses API."""
        return ResponseRenderer(identity, self._echo, self._tools.called, packs_reasoning=self._packs_reasoning)


class ResponsesEndpoint(ConversationEndpoint[ParsedResponse]):
    """Responses."""

    ENDPOINT = "responses"
    MODEL_TYPE = CHAT
    BODY: ClassVar[type[InputTokensRequest]] = ResponsesRequest
    PASSIVE = RESPONSES_PASSIVE
    USER = end_user.USER
    SESSION = end_user.RESPONSES_SESSION
    ID_PREFIX = ID_PREFIX
    DONE = b""

    def check(self, raw: dict[str, Any]) -> ParsedResponse:
        """Check a body."""
        return ParsedResponse(parse_responses(raw, self.BODY, self.PASSIVE), raw, self._chats)

    async def _stream(
        self,
        exchange: Exchange,
        parsed: ParsedResponse,
        prompts: Sequence[Prompt],
        renderer: Renderer,
        answer: Answer,
    ) -> web.StreamResponse:
        if isinstance(renderer, ResponseRenderer):
            # The last event of a stream that breaks holds the response as far as it came.
            exchange.broken = renderer.failed
            exchange.finalize = self._finalize(parsed, renderer)
        return await super()._stream(exchange, parsed, prompts, renderer, answer)

    def _finalize(self, parsed: ParsedResponse, renderer: ResponseRenderer) -> Callable[[], Awaitable[bytes]] | None:
        """Return what makes the last event of a stream, if something has to be done before it."""
        return None


class InputTokensEndpoint(CountingEndpoint):
    """Counts the tokens of requests."""

    ENDPOINT = "input_tokens"
    BODY: ClassVar[type[InputTokensRequest]] = InputTokensRequest
    PASSIVE = INPUT_TOKENS_PASSIVE
    EXTRA_FIELDS: ClassVar[dict[str, Any]] = {"object": "response.input_tokens"}

    def check(self, raw: dict[str, Any]) -> ParsedResponse:
        """Check a body."""
        return ParsedResponse(parse_responses(raw, self.BODY, self.PASSIVE), raw, self._chats)


class RememberingResponsesEndpoint(ResponsesEndpoint):
    """Responses that are stored, and can continue stored ones."""

    BODY: ClassVar[type[InputTokensRequest]] = RememberedRequest
    PASSIVE = REMEMBERED_RESPONSES_PASSIVE

    def __init__(
        self,
        services: FrontendServices,
        ignored: IgnoredFields,
        answering: Answering,
        chats: ChatDependencies,
        memory: ResponseMemory,
    ) -> None:
        super().__init__(services, ignored, answering, chats)
        self._responses = memory

    async def _check(self, http: web.Request, body: Body) -> ParsedResponse:
        return await _recalling(self, self.BODY, http, body, self._responses, self._chats)

    def _finalize(self, parsed: ParsedResponse, renderer: ResponseRenderer) -> Callable[[], Awaitable[bytes]] | None:
        if parsed.recalled is None or not parsed.recalled.keeps:
            return None
        renderer.finalizes = True

        async def finalize() -> bytes:
            return renderer.finalized(await self._kept(parsed, renderer))

        return finalize

    async def _collect(
        self, exchange: Exchange, parsed: ParsedResponse, prompts: Sequence[Prompt], renderer: Renderer, answer: Answer
    ) -> Pieces:
        body = await super()._collect(exchange, parsed, prompts, renderer, answer)
        if not isinstance(renderer, ResponseRenderer) or parsed.recalled is None or not parsed.recalled.keeps:
            return body
        return [encode(await self._kept(parsed, renderer))]

    async def _kept(self, parsed: ParsedResponse, renderer: ResponseRenderer) -> dict[str, Any]:
        """Return the whole response once it is stored, or with the note that it is not."""
        response = renderer.whole()
        if parsed.recalled is None or await self._responses.keep(parsed.recalled, response):
            return response
        return response | {"store": False}


class RememberingInputTokensEndpoint(InputTokensEndpoint):
    """Counts the tokens of requests that go on from stored responses."""

    BODY: ClassVar[type[InputTokensRequest]] = RememberedInputTokens
    PASSIVE = REMEMBERED_INPUT_TOKENS_PASSIVE

    def __init__(
        self, services: FrontendServices, ignored: IgnoredFields, chats: ChatDependencies, memory: ResponseMemory
    ) -> None:
        super().__init__(services, ignored, chats)
        self._responses = memory

    async def _check(self, http: web.Request, body: Body) -> ParsedResponse:
        return await _recalling(self, self.BODY, http, body, self._responses, self._chats, counts=True)


async def _recalling(
    endpoint: ModelEndpoint[Any],
    kind: type[InputTokensRequest],
    http: web.Request,
    body: Body,
    memory: ResponseMemory,
    chats: ChatDependencies,
    *,
    counts: bool = False,
) -> ParsedResponse:
    """Return a checked body with what it refers to put before its own input."""
    raw = body.raw

    def parse(given: dict[str, Any]) -> InputTokensRequest:
        return parse_responses(given, kind, endpoint.PASSIVE)

    # First by itself, so that what is wrong with it is told by its own places.
    request = await endpoint.off_loop(http, body, parse)
    recalled = await memory.recall(raw, principal_of(http), body.size, counts=counts)

    def whole() -> ParsedResponse:
        full = parse({**raw, "input": [*recalled.before, *recalled.own]}) if recalled.refers else request
        return ParsedResponse(full, raw, chats, recalled)

    return await run_for_size(recalled.size, whole)


def _echo(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what a response repeats of its request, with what counts where nothing was said."""
    reasoning = raw.get("reasoning") or {}
    return {
        "background": False,
        "instructions": raw.get("instructions"),
        "max_output_tokens": raw.get("max_output_tokens"),
        "max_tool_calls": raw.get("max_tool_calls"),
        "metadata": raw.get("metadata") or {},
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": raw.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": raw.get("temperature"),
        "text": {"format": {"type": "text"}, **_given(raw.get("text"))},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_logprobs": 0,
        "top_p": raw.get("top_p"),
        "truncation": "disabled",
        "user": raw.get("user"),
    }


def _stored_echo(raw: dict[str, Any], recalled: RecalledInput) -> dict[str, Any]:
    """Return what a response tells of being stored."""
    conversation = recalled.conversation
    return {"store": recalled.stores, "conversation": None if conversation is None else {"id": conversation.id}}


def _given(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}
