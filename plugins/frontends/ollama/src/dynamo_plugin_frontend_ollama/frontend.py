"""`OllamaFrontend`: the routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import msgspec
from dynamo_core import HttpHandler, HttpRoute, PluginConfig
from dynamo_generation.api import Api, post
from dynamo_generation.endpoints.openapi import Operation

from dynamo_plugin_frontend_ollama import schemas
from dynamo_plugin_frontend_ollama.config import OllamaConfig
from dynamo_plugin_frontend_ollama.conventions import respond_error
from dynamo_plugin_frontend_ollama.embed import EmbeddingsEndpoint, EmbedEndpoint
from dynamo_plugin_frontend_ollama.endpoint import ChatEndpoint, GenerateEndpoint
from dynamo_plugin_frontend_ollama.models import Models
from dynamo_plugin_frontend_ollama.requests import EMBED_PASSIVE, OllamaShowRequest

#: What would change models.
_REFUSED = (
    *(("POST", name) for name in ("pull", "push", "create", "copy", "blobs/{digest}")),
    *(("DELETE", "delete"), ("HEAD", "blobs/{digest}")),
)


class OllamaFrontend(Api):
    """Ollama's API."""

    NAME = "ollama"
    Config: ClassVar[type[PluginConfig]] = OllamaConfig

    config: OllamaConfig

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return the routes, all below one prefix but the one that tells that the server is there."""
        path = cast("OllamaConfig", config).ollama_prefix
        yield from (f"POST {path}/{name}" for name in ("chat", "generate", "embed", "embeddings", "show"))
        yield from (f"GET {path}/{name}" for name in ("tags", "ps", "version"))
        yield from (f"{method} {path}/{name}" for method, name in _REFUSED)
        yield f"GET {_root(path)}"

    def operations(self) -> Iterable[Operation]:
        """Return the routes, and how their bodies are read."""
        path, services, generation = self.config.ollama_prefix, self.services, self.generation
        ignored, common = generation.ignored, (generation.ignored, generation.answering, generation.chats)
        chat, generate = ChatEndpoint(services, *common), GenerateEndpoint(services, *common)
        yield post(f"{path}/chat", chat, schemas.OllamaChat, "Answers to conversations, streamed or not")
        yield post(f"{path}/generate", generate, schemas.OllamaGenerated, "Answers to prompts, streamed or not")
        yield post(f"{path}/embed", EmbedEndpoint(services, ignored), schemas.OllamaEmbedded, "Embeddings of texts")
        vectors = EmbeddingsEndpoint(services, ignored)
        yield post(f"{path}/embeddings", vectors, schemas.OllamaVector, "The embedding of a text")
        models = Models(services.models)
        yield _route("GET", f"{path}/tags", models.tags, "All models", answer=schemas.OllamaModels)
        yield _route("GET", f"{path}/ps", models.running, "Models that can be asked", answer=schemas.OllamaModels)
        yield _route("GET", f"{path}/version", models.version, "The version", answer=schemas.OllamaVersion)
        shown: dict[str, Any] = {"body": OllamaShowRequest, "passive": EMBED_PASSIVE}
        yield _route("POST", f"{path}/show", models.show, "One model", answer=schemas.OllamaShown, **shown)
        yield _route("GET", _root(path), models.alive, "Whether the server is there", content_type="text/plain")
        for method, name in _REFUSED:
            yield _route(method, f"{path}/{name}", models.refuse, "Refused: models are of the workers", told=False)


def _root(path: str) -> str:
    """Return the address that clients are told."""
    return path.rpartition("/")[0] or "/"


def _route(
    method: str,
    path: str,
    handler: HttpHandler,
    summary: str,
    *,
    answer: type[msgspec.Struct] | None = None,
    **more: Any,
) -> Operation:
    route = HttpRoute(method, path, handler, summary, respond_error=respond_error)
    return Operation(route, answer=answer, error=schemas.OllamaError, **more)
