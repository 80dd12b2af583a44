"""What the routes answer with, for the description of the API.

Answers are made by hand, as that is what they cost least by; these types are not used to make them. A test holds the
two together: what the routes answer is compared with the description.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from dynamo_plugin_frontend_openai.schema_check import Verdict

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class ErrorDetail(msgspec.Struct):
    """What went wrong, in the shape that the official clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error: for the official clients, and flat for other clients. `code` is the HTTP status."""

    error: ErrorDetail
    message: str
    type: str
    code: int


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """An error in the shape of the Anthropic API."""

    type: Literal["error"]
    error: MessagesErrorDetail


class CachedTokens(msgspec.Struct):
    """How much of the prompts engines had in their caches."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    """How much of the answers was reasoning."""

    reasoning_tokens: int


class TokenUsage(msgspec.Struct):
    """How many tokens a request took, over all choices."""

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


class EmbeddingVector(msgspec.Struct):
    """The vector of one input: numbers, or little-endian 32-bit floats in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """How many tokens the inputs had."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """A vector for each input."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


class TextScore(msgspec.Struct):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(msgspec.Struct):
    """A score for each document."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct):
    """A document, as it was given."""

    text: str


class RankedDocument(msgspec.Struct):
    """The place of a document in the request, and its score."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedList(msgspec.Struct):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class ThinkingTokens(msgspec.Struct):
    """How much of a message was thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """How many tokens a message took. `input_tokens` are those of the prompt that no cache had."""

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


class TokenCount(msgspec.Struct):
    """How many tokens the request has."""

    input_tokens: int


class InputTokens(msgspec.Struct):
    """How many tokens the request has."""

    object: str
    input_tokens: int


class ResponseUsage(msgspec.Struct):
    """How many tokens a response took."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class WholeResponse(msgspec.Struct):
    """A whole response. An item of `output` is `message`, `reasoning` or `function_call`; the rest repeats the
    request."""

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


class TokenizedText(msgspec.Struct):
    """The tokens; `token_strs` if they were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    """The text."""

    prompt: str


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
    """Whether a model can be asked, and if not, why and which roles have no worker."""

    model: str
    ready: bool
    reason: str | None
    missing_worker_types: list[str]


class ModelFacts(msgspec.Struct):
    """What is public about a model."""

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
    """Names of models by what they can be asked for, and the facts of each."""

    chat_completion_models: list[str]
    completion_models: list[str]
    embedding_models: list[str]
    score_models: list[str]
    rerank_models: list[str]
    models: list[ModelFacts]
