"""`OpenAIFrontend`: the routes of the OpenAI API and their parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from dynamo_core import HttpRoute, PluginConfig
from dynamo_generation.api import Api, post
from dynamo_generation.endpoints.openapi import Description, Operation

from dynamo_plugin_frontend_openai import response_schemas as schemas
from dynamo_plugin_frontend_openai.busy_threshold import (
    BusyThresholds,
    PlainError,
    ThresholdEntry,
    ThresholdList,
    ThresholdRequest,
)
from dynamo_plugin_frontend_openai.chat import ChatEndpoint
from dynamo_plugin_frontend_openai.completions import CompletionEndpoint
from dynamo_plugin_frontend_openai.config import OpenAIConfig
from dynamo_plugin_frontend_openai.embeddings import EmbeddingEndpoint, EmbeddingList
from dynamo_plugin_frontend_openai.models import ModelLists
from dynamo_plugin_frontend_openai.route_explain import RouteExplanations
from dynamo_plugin_frontend_openai.scoring import RankedList, RerankEndpoint, ScoreEndpoint, ScoreList
from dynamo_plugin_frontend_openai.tokens import DetokenizedText, DetokenizeEndpoint, TokenizedText, TokenizeEndpoint


class OpenAIFrontend(Api):
    """The OpenAI-compatible API."""

    NAME = "openai"
    COMPANIONS = ("responses", "anthropic")
    Config: ClassVar[type[PluginConfig]] = OpenAIConfig

    config: OpenAIConfig

    def operations(self) -> Iterable[Operation]:
        """Return the routes for clients and operators, and a description of those of all APIs."""
        yield from self._for_models()
        yield from self._model_lists()
        if not self.config.disable_admin_api:
            yield from self._for_operators()
        config = self.config
        yield from Description(
            config.openapi_path, config.docs_path, self.generation.operations, self.services.routes
        ).own()

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return the public routes as the settings tell them."""
        config = cast("OpenAIConfig", config)
        posts = (config.chat_path, config.completions_path, config.embeddings_path, config.tokenize_path)
        for path in (*posts, config.detokenize_path, *config.score_paths, *config.rerank_paths):
            yield f"POST {path}"
        one = f"{config.models_path}/{{id:.+}}"
        lists = (config.models_path, f"{one}/ready", one, config.list_models_path)
        for path in (*lists, config.openapi_path, config.docs_path):
            yield f"GET {path}"

    def _for_operators(self) -> Iterable[Operation]:
        control = self.services.thresholds
        if control is not None:
            for route in BusyThresholds(self.services, control).routes():
                body = ThresholdRequest if route.method == "POST" else None
                yield Operation(
                    route, body, answer=ThresholdList if route.method == "GET" else ThresholdEntry, error=PlainError
                )
        for route in RouteExplanations(self.services, self.generation.chats).routes():
            yield Operation(route)

    def _for_models(self) -> Iterable[Operation]:
        config, services, generation = self.config, self.services, self.generation
        ignored, answering, chats = generation.ignored, generation.answering, generation.chats
        chat = ChatEndpoint(services, ignored, answering, chats)
        completions = CompletionEndpoint(services, ignored, answering)
        score, rerank = ScoreEndpoint(services, ignored), RerankEndpoint(services, ignored)
        yield post(config.chat_path, chat, schemas.ChatCompletion, "Chat completions, streaming or not")
        yield post(config.completions_path, completions, schemas.TextCompletion, "Text completions, streaming or not")
        yield post(config.embeddings_path, EmbeddingEndpoint(services, ignored), EmbeddingList, "Embeddings")
        for path in config.score_paths:
            yield post(path, score, ScoreList, "Scores of documents")
        for path in config.rerank_paths:
            yield post(path, rerank, RankedList, "Documents by relevance")
        tokenize, detokenize = TokenizeEndpoint(services, ignored, chats), DetokenizeEndpoint(services, ignored)
        yield post(config.tokenize_path, tokenize, TokenizedText, "The tokens of a text")
        yield post(config.detokenize_path, detokenize, DetokenizedText, "The text of tokens")

    def _model_lists(self) -> list[Operation]:
        config = self.config
        lists = ModelLists(self.services.models, config.owned_by)
        one = f"{config.models_path}/{{id:.+}}"
        return [
            Operation(HttpRoute("GET", config.models_path, lists.openai, "All models"), answer=schemas.ModelList),
            # Before the route of one model, whose name may end in anything else.
            Operation(
                HttpRoute("GET", f"{one}/ready", lists.ready, "Whether one model can be asked"),
                answer=schemas.ModelReadiness,
                also=503,
            ),
            Operation(HttpRoute("GET", one, lists.one, "One model"), answer=schemas.ModelEntry),
            Operation(
                HttpRoute("GET", config.list_models_path, lists.extended, "All models with their public facts"),
                answer=schemas.ModelsByUse,
            ),
        ]
