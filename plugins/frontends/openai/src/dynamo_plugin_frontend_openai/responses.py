"""``POST /v1/responses`` and its ``/input_tokens``: the Responses API, without a memory of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web
from dynamo_core.protocol import CHAT

from dynamo_plugin_frontend_openai import asking
from dynamo_plugin_frontend_openai.answer import Answer
from dynamo_plugin_frontend_openai.chat import ChatDependencies, ConversationEndpoint
from dynamo_plugin_frontend_openai.counting import CountingEndpoint
from dynamo_plugin_frontend_openai.endpoint import Exchange
from dynamo_plugin_frontend_openai.from_responses import NAMES, chat_of_response
from dynamo_plugin_frontend_openai.generation import Renderer
from dynamo_plugin_frontend_openai.preprocess import Prompt
from dynamo_plugin_frontend_openai.render import Identity
from dynamo_plugin_frontend_openai.render_responses import ID_PREFIX, ResponseRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.response_tools import ResponseTools
from dynamo_plugin_frontend_openai.requests.responses import (
    InputTokensRequest,
    ResponsesRequest,
    parse_responses,
)
from dynamo_plugin_frontend_openai.translated import TranslatedRequest

if TYPE_CHECKING:
    from dynamo_core import ServedModel


class ParsedResponse(TranslatedRequest):
    """A checked request of the Responses API; `raw` is its body."""

    NAMES = NAMES

    def __init__(self, request: InputTokensRequest, raw: dict[str, Any], chats: ChatDependencies) -> None:
        self._tools = ResponseTools.of(request.tools or ())
        super().__init__(chat_of_response(request, self._tools), chats)
        self.ignored = self._tools.left_out
        self._echo = _echo(raw)

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> ResponseRenderer:
        """Events and bodies of the Responses API."""
        return ResponseRenderer(identity, self._echo, self._tools.called)


class ResponsesEndpoint(ConversationEndpoint[ParsedResponse]):
    """Responses."""

    ENDPOINT = "responses"
    MODEL_TYPE = CHAT
    BODY = ResponsesRequest
    PASSIVE = fields.RESPONSES
    USER = asking.USER
    SESSION = asking.RESPONSES_SESSION
    ID_PREFIX = ID_PREFIX
    DONE = b""

    def check(self, raw: dict[str, Any]) -> ParsedResponse:
        """Checks a body."""
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
        return await super()._stream(exchange, parsed, prompts, renderer, answer)


class InputTokensEndpoint(CountingEndpoint):
    """Counts the tokens of requests."""

    ENDPOINT = "input_tokens"
    BODY = InputTokensRequest
    PASSIVE = fields.INPUT_TOKENS
    ALSO: ClassVar[dict[str, Any]] = {"object": "response.input_tokens"}

    def check(self, raw: dict[str, Any]) -> ParsedResponse:
        """Checks a body."""
        return ParsedResponse(parse_responses(raw, self.BODY, self.PASSIVE), raw, self._chats)


def _echo(raw: dict[str, Any]) -> dict[str, Any]:
    """What a response repeats of its request, with what counts where nothing was said."""
    reasoning = raw.get("reasoning") or {}
    return {
        "background": False,
        "instructions": raw.get("instructions"),
        "max_output_tokens": raw.get("max_output_tokens"),
        "max_tool_calls": raw.get("max_tool_calls"),
        "metadata": raw.get("metadata") or {},
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
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


def _given(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}
