"""The settings of the frontend beside the listener's own."""

from __future__ import annotations

from dynamo_generation.config import GenerationConfig, Path
from pydantic import Field


class OpenAIConfig(GenerationConfig):
    """The address of the routes."""

    chat_path: Path = Field(default="/v1/chat/completions", description="Path of chat completions.")
    completions_path: Path = Field(default="/v1/completions", description="Path of text completions.")
    embeddings_path: Path = Field(default="/v1/embeddings", description="Path of embeddings.")
    score_paths: tuple[Path, ...] = Field(default=("/v1/score", "/score"), description="Paths of scores of texts.")
    rerank_paths: tuple[Path, ...] = Field(
        default=("/v1/rerank", "/rerank", "/v2/rerank"), description="Paths of sorting documents by relevance."
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
    owned_by: str | None = Field(
        default=None, min_length=1, description="`owned_by` of all models; null means the namespace of their workers."
    )
    disable_admin_api: bool = Field(
        default=False, description="Whether the routes for operators, for thresholds and routing, are left out."
    )
