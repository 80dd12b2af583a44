"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: the Anthropic API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from dynamo_core import Problem
from dynamo_core.errors import LIMIT_HEADER
from dynamo_core.protocol import CHAT
from dynamo_generation.answers.render import Identity, encode
from dynamo_generation.endpoints.conversation import ChatDependencies, ConversationEndpoint
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint, ParsedT
from dynamo_generation.endpoints.token_count_route import CountingEndpoint
from dynamo_generation.endpoints.translated_request import TranslatedRequest
from dynamo_generation.prompts.preprocess import Prompt
from dynamo_generation.requests import end_user
from dynamo_http import error_response

from dynamo_plugin_frontend_anthropic.render import MessageRenderer
from dynamo_plugin_frontend_anthropic.requests import (
    COUNT_TOKENS_PASSIVE,
    MESSAGES_PASSIVE,
    CountTokensRequest,
    MessagesRequest,
    left_out,
    parse_messages,
)
from dynamo_plugin_frontend_anthropic.schemas import MessagesError
from dynamo_plugin_frontend_anthropic.to_chat import NAMES, chat_of_messages

if TYPE_CHECKING:
    from dynamo_core import ServedModel

#: What the Anthropic API calls errors, by their HTTP status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_BAD_REQUEST, _SERVER = "invalid_request_error", "api_error"
_SERVER_ERROR = 500
_LIMIT_HEADER = "anthropic-ratelimit-"
_SPAN = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9}(?:\.\d{1,9})?)s)?(?:(\d{1,9})ms)?")
#: What a client needs to do without a field that is refused: tools of the SDKs then send the whole conversation.
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}


class ParsedMessages(TranslatedRequest):
    """A checked request of the Anthropic API."""

    NAMES = NAMES

    def __init__(self, request: CountTokensRequest, chats: ChatDependencies) -> None:
        super().__init__(chat_of_messages(request), chats)
        self.ignored = left_out(request.tools or ())
        self._edits = request.context_management is not None
        self._thoughts = request.thinking is None or request.thinking.display != "omitted"

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> MessageRenderer:
        """Return events and bodies of the Anthropic API."""
        told = sum(len(prompt.token_ids) for prompt in prompts)
        return MessageRenderer(identity, told, edits=self._edits, thoughts=self._thoughts)


class _Wording(ModelEndpoint[ParsedT]):
    """Words errors as the Anthropic API does."""

    ERROR = MessagesError

    def respond_error(self, problem: Problem) -> web.Response:
        """Return an error as an answer of its own."""
        return respond_error(problem)

    def last_event(self, exchange: Exchange, problem: Problem, error: Exception) -> bytes:
        """Return the event that ends a stream which broke."""
        return b"event: error\ndata: %b\n\n" % error_body(problem)


class MessagesEndpoint(_Wording[ParsedMessages], ConversationEndpoint[ParsedMessages]):
    """Answers conversations."""

    ENDPOINT = "messages"
    MODEL_TYPE = CHAT
    BODY = MessagesRequest
    PASSIVE = MESSAGES_PASSIVE
    USER = end_user.MESSAGES_USER
    SESSION = ()
    ID_PREFIX = "msg_"
    DONE = b""

    def check(self, raw: dict[str, Any]) -> ParsedMessages:
        """Check a body."""
        return ParsedMessages(parse_messages(raw, self.BODY, self.PASSIVE), self._chats)


class CountTokensEndpoint(_Wording[TranslatedRequest], CountingEndpoint):
    """Counts the tokens of conversations."""

    ENDPOINT = "count_tokens"
    BODY = CountTokensRequest
    PASSIVE = COUNT_TOKENS_PASSIVE

    def check(self, raw: dict[str, Any]) -> ParsedMessages:
        """Check a body."""
        return ParsedMessages(parse_messages(raw, self.BODY, self.PASSIVE), self._chats)


class _Detail(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    details: Mapping[str, Any] | None = None


class _Body(msgspec.Struct):
    error: _Detail
    type: str = "error"


def respond_error(problem: Problem) -> web.Response:
    """Return an error as an answer of its own."""
    worded = msgspec.structs.replace(problem, headers=_headers(problem.headers)) if problem.headers else problem
    return error_response(worded, error_body(problem))


def error_body(problem: Problem) -> bytes:
    """Return ``{"type": "error", "error": {"type", "message", "details"?}}``.

    The message names the field: there is no key.
    """
    kind = _TYPES.get(problem.status) or (_BAD_REQUEST if problem.status < _SERVER_ERROR else _SERVER)
    message = problem.message
    if problem.param is not None and problem.param not in message:
        message = f"{problem.param}: {message}"
    details = _DETAILS.get(problem.param or "")
    try:
        return encode(_Body(_Detail(kind, message, details)))
    except UnicodeEncodeError:
        # Half a surrogate pair, quoted from a client's body.
        return encode(_Body(_Detail(kind, message.encode("utf-8", "replace").decode(), details)))


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as the Anthropic API names them: ``anthropic-ratelimit-requests-remaining``."""
    found = {}
    for name, value in headers.items():
        what, _, unit = name.removeprefix(LIMIT_HEADER).partition("-")
        if not name.startswith(LIMIT_HEADER):
            found[name] = value
        elif what != "reset":
            found[f"{_LIMIT_HEADER}{unit}-{what}"] = value
        elif (moment := _moment(value)) is not None:
            found[f"{_LIMIT_HEADER}{unit}-{what}"] = moment
    return found


def _moment(span: str) -> str | None:
    """Return when a time such as ``6m0s`` from now is, as this API tells times; None if it is no such time."""
    parts = _SPAN.fullmatch(span)
    if not span or parts is None:
        return None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in parts.groups())
    end = datetime.now(UTC) + timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
    return f"{end:%Y-%m-%dT%H:%M:%SZ}"
