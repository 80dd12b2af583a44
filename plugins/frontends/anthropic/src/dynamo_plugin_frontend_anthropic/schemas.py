"""The response schemas of the Anthropic API, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from dynamo_generation.choices.schema_validation import Verdict
from msgspec import UNSET, UnsetType


class MessagesErrorDetail(msgspec.Struct):
    """An error's type and message."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """An error in the shape of the Anthropic API."""

    type: Literal["error"]
    error: MessagesErrorDetail


class ThinkingTokens(msgspec.Struct):
    """Thinking tokens of a message."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """The token usage of a message. `input_tokens` are the prompt tokens that no cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET
    cache_creation_input_tokens: int | UnsetType = UNSET
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class AnthropicMessage(msgspec.Struct):
    """A whole message. A block of `content` is `text`, `thinking` or `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: MessageUsage
    structured_output: Verdict | UnsetType = UNSET


class ServedModelInfo(msgspec.Struct):
    """A model, as the Anthropic API lists it."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ServedModels(msgspec.Struct):
    """A page of the list of models."""

    data: list[ServedModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenCount(msgspec.Struct):
    """The number of tokens of the request."""

    input_tokens: int
