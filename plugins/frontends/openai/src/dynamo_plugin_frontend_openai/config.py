"""The settings of the frontend beside the listener's own."""

from __future__ import annotations

from typing import Annotated, Literal

from dynamo_core import PluginConfig
from pydantic import Field

#: Turns of a stored conversation, at most.
MOST_TURNS = 100_000
Path = Annotated[str, Field(pattern=r"^/[^{}\s?#]*[^/{}\s?#]$")]


class OpenAIConfig(PluginConfig):
    """Where the routes are, and how far a slow reader may lag behind."""

    chat_path: Path = Field(default="/v1/chat/completions", description="Path of chat completions.")
    completions_path: Path = Field(default="/v1/completions", description="Path of text completions.")
    embeddings_path: Path = Field(default="/v1/embeddings", description="Path of embeddings.")
    score_paths: tuple[Path, ...] = Field(default=("/v1/score", "/score"), description="Paths of scores of texts.")
    rerank_paths: tuple[Path, ...] = Field(
        default=("/v1/rerank", "/rerank", "/v2/rerank"), description="Paths of sorting documents by relevance."
    )
    messages_path: Path = Field(
        default="/v1/messages", description="Path of the Anthropic API; `/count_tokens` below it counts tokens."
    )
    responses_path: Path = Field(default="/v1/responses", description="Path of the Responses API.")
    conversations_path: Path = Field(
        default="/v1/conversations", description="Path of conversations; served where `response_store` names a store."
    )
    tokenize_path: Path = Field(default="/tokenize", description="Path that gives the tokens of a text.")
    detokenize_path: Path = Field(default="/detokenize", description="Path that gives the text of tokens.")
    models_path: Path = Field(
        default="/v1/models",
        description="Path of the model list; `/{id}` below it shows one model, `/{id}/ready` whether it can be asked.",
    )
    list_models_path: Path = Field(default="/dynamo/alpha/list-models", description="Path of the extended model list.")
    openapi_path: Path = Field(default="/openapi.json", description="Path of the description of the API.")
    docs_path: Path = Field(default="/docs", description="Path of the description as a page.")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="What becomes of a request with fields that no API documents: refuse it, or leave them out and "
        "name them in the answer's header x-dynamo-ignored-fields.",
    )
    owned_by: str | None = Field(
        default=None, min_length=1, description="`owned_by` of all models; null means the namespace of their workers."
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=True, description="Whether the template is not shown the tools of a request that must not call any."
    )
    disable_admin_api: bool = Field(
        default=False, description="Whether the routes for operators, for thresholds and routing, are left out."
    )
    template_timeout: float = Field(
        default=5.0, gt=0, description="Seconds that the chat template of a model may take for a conversation."
    )
    unary_answer_limit_mb: int = Field(
        default=256, ge=1, description="MB that an answer which is not streamed may take while it is collected."
    )
    unary_answers_limit_mb: int = Field(
        default=256,
        ge=1,
        description="MB that all such answers of a process may take together; small ones are always collected.",
    )
    response_store_policy: Literal["fail", "pass"] = Field(
        default="fail",
        description="What becomes of an answer that cannot be stored: its request fails, or it goes out with "
        "`store: false`.",
    )
    response_store_life: float = Field(
        default=30 * 86400.0,
        gt=0,
        le=10 * 366 * 86400.0,
        description="Seconds that responses and conversations are kept after they were last used.",
    )
    response_store_timeout: float = Field(
        default=5.0, gt=0, le=60, description="Seconds that a call of the response store may take."
    )
    response_store_turns: int = Field(
        default=1000, ge=1, le=MOST_TURNS, description="Turns of a stored conversation that one request may go on from."
    )
    response_store_context_mb: int = Field(
        default=16, ge=1, le=1024, description="MB of stored responses that one request may go on from."
    )
    write_buffer: int = Field(
        default=256 * 1024, ge=0, description="Bytes that may wait for a slow reader before its request is paused."
    )
