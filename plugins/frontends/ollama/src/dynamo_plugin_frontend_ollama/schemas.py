"""The response schemas of Ollama's API, for the OpenAPI description. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from dynamo_generation.choices.schema_validation import Verdict
from msgspec import UNSET, UnsetType


class OllamaError(msgspec.Struct):
    """An error in the shape of Ollama's API."""

    error: str


class _Answer(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    structured_output: Verdict | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct):
    """A message of the model."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaChat(_Answer, kw_only=True):
    """A whole answer to a conversation."""

    message: OllamaAnswer


class OllamaGenerated(_Answer, kw_only=True):
    """A whole answer to a prompt."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedded(msgspec.Struct):
    """One vector per text."""

    embeddings: list[list[float]]
    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(msgspec.Struct):
    """The vector of a text."""

    embedding: list[float]


class OllamaModels(msgspec.Struct):
    """The served models."""

    models: list[dict[str, Any]]


class OllamaShown(msgspec.Struct):
    """The facts of a model."""

    modified_at: str
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]


class OllamaVersion(msgspec.Struct):
    """The version of Ollama that has this API."""

    version: str
