"""The response schemas of the Responses API, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from dynamo_generation.choices.schema_validation import Verdict
from msgspec import UNSET, UnsetType


class InputTokens(msgspec.Struct):
    """The number of tokens of the request."""

    object: str
    input_tokens: int


class ResponseUsage(msgspec.Struct):
    """The token usage of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class WholeResponse(msgspec.Struct):
    """A whole response.

    An item of `output` is `message`, `reasoning` or `function_call`; the rest repeats the request.
    """

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    structured_output: Verdict | UnsetType = UNSET


class DeletedObject(msgspec.Struct):
    """Something that was removed."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: bool


class ConversationObject(msgspec.Struct):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str | None]


class StoredItem(msgspec.Struct):
    """An item; the rest depends on its type."""

    id: str
    type: str


class ItemPage(msgspec.Struct):
    """Items, and whether there are more."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
