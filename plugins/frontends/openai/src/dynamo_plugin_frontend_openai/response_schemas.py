"""The response schemas of the routes, for the OpenAPI description.

Answers are made by hand, as that is what they cost least by; these types are not used to make them. A test holds the
two together: what the routes answer is compared with the description.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from dynamo_generation.choices.schema_validation import Verdict
from dynamo_generation.endpoints.usage_schema import CachedTokens, ReasoningTokens
from msgspec import UNSET, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class TokenUsage(msgspec.Struct):
    """The token usage of a request, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class MadeFunctionCall(msgspec.Struct):
    """The function that the model wants called; `arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class MadeToolCall(msgspec.Struct):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class AssistantMessage(msgspec.Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    structured_output: Verdict | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    nvext: dict[str, Any] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One of the answers."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """A whole text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    nvext: dict[str, Any] | UnsetType = UNSET


class ModelEntry(msgspec.Struct):
    """A model, as the OpenAI API lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    """All models, as the OpenAI API lists them."""

    object: Literal["list"]
    data: list[ModelEntry]


class ModelReadiness(msgspec.Struct):
    """Whether a model can serve, and if not, the reason and the roles without a worker."""

    model: str
    ready: bool
    reason: str | None
    missing_worker_types: list[str]


class ModelFacts(msgspec.Struct):
    """The public facts of a model."""

    name: str
    ready: bool
    missing_worker_types: list[str]
    instances: int
    model_types: list[str]
    model_input: str
    context_length: int | None
    kv_cache_block_size: int | None
    migration_limit: int
    capabilities: list[str]
    tokenizer: Any
    tool_call_parser: str | None
    tool_call_parser_reason: str
    reasoning_parser: str | None
    reasoning_parser_reason: str


class ModelsByUse(msgspec.Struct):
    """The names of models by capability, and the facts of each."""

    chat_completion_models: list[str]
    completion_models: list[str]
    embedding_models: list[str]
    score_models: list[str]
    rerank_models: list[str]
    models: list[ModelFacts]
