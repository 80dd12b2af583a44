"""``POST /v1/responses``: the Responses API, without a memory of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core.protocol.records import CHAT

from dynamo_plugin_frontend_openai.answer import Answer
from dynamo_plugin_frontend_openai.answering import Answering
from dynamo_plugin_frontend_openai.chat import Chats
from dynamo_plugin_frontend_openai.endpoint import Exchange
from dynamo_plugin_frontend_openai.from_responses import NAMES, chat_of_response
from dynamo_plugin_frontend_openai.generation import GenerationEndpoint, Renderer
from dynamo_plugin_frontend_openai.preprocess import Prompt
from dynamo_plugin_frontend_openai.render import Identity
from dynamo_plugin_frontend_openai.render_responses import ID_PREFIX, ResponseRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.responses import ResponsesRequest, parse_responses
from dynamo_plugin_frontend_openai.translated import TranslatedAsk

if TYPE_CHECKING:
    from dynamo_core.contracts.frontend import FrontendServices, ServedModel


class ResponsesAsk(TranslatedAsk):
    """A checked request of the Responses API."""

    NAMES = NAMES

    def __init__(self, raw: dict[str, Any], chats: Chats) -> None:
        super().__init__(chat_of_response(parse_responses(raw)), chats)
        self._echo = _echo(raw)

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> ResponseRenderer:
        """Events and bodies of the Responses API."""
        return ResponseRenderer(identity, self._echo)


class ResponsesEndpoint(GenerationEndpoint[ResponsesAsk]):
    """Responses."""

    ENDPOINT = "responses"
    MODEL_TYPE = CHAT
    BODY = ResponsesRequest
    PASSIVE = fields.RESPONSES
    ID_PREFIX = ID_PREFIX
    DONE = b""

    def __init__(self, services: FrontendServices, answering: Answering, chats: Chats) -> None:
        super().__init__(services, answering)
        self._chats = chats

    def check(self, raw: dict[str, Any]) -> ResponsesAsk:
        """Checks a body."""
        return ResponsesAsk(raw, self._chats)

    async def _stream(
        self,
        exchange: Exchange,
        ask: ResponsesAsk,
        prompts: Sequence[Prompt],
        renderer: Renderer,
        answer: Answer,
    ) -> web.StreamResponse:
        if isinstance(renderer, ResponseRenderer):
            # The last event of a stream that breaks holds the response as far as it came.
            exchange.broken = renderer.failed
        return await super()._stream(exchange, ask, prompts, renderer, answer)


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
