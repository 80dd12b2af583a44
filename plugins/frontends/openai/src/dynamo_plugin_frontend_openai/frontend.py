"""`OpenAIFrontend`: the routes and what stands behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec
from dynamo_core import Frontend, FrontendServices, HttpRoute, PluginConfig, TaskSet, Tokenizer
from dynamo_generation.answers.answer_memory import MB, AnswerMemory
from dynamo_generation.answers.answering import Answering
from dynamo_generation.choices.schema_check import SchemaChecker
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.endpoints.endpoint import ModelEndpoint
from dynamo_generation.endpoints.generation import GenerationEndpoint
from dynamo_generation.endpoints.openapi import Description, Operation
from dynamo_generation.heap import give_back
from dynamo_generation.prompts.meters import call_counter
from dynamo_generation.prompts.token_cache import token_memory
from dynamo_generation.requests.ignored import IgnoredFields
from dynamo_generation.templates.template import TemplateStore, describe_template
from dynamo_text import load_tokenizer

from dynamo_plugin_frontend_openai import response_schemas as schemas
from dynamo_plugin_frontend_openai.anthropic import schemas as anthropic_schemas
from dynamo_plugin_frontend_openai.anthropic.endpoint import CountTokensEndpoint, MessagesEndpoint
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
from dynamo_plugin_frontend_openai.embeddings import EmbeddingEndpoint
from dynamo_plugin_frontend_openai.models import ModelLists
from dynamo_plugin_frontend_openai.responses import schemas as responses_schemas
from dynamo_plugin_frontend_openai.responses.endpoint import (
    InputTokensEndpoint,
    RememberingInputTokensEndpoint,
    RememberingResponsesEndpoint,
    ResponsesEndpoint,
)
from dynamo_plugin_frontend_openai.responses.memory import ResponseMemory, response_memory
from dynamo_plugin_frontend_openai.responses.routes import StoredResponses
from dynamo_plugin_frontend_openai.route_explain import RouteExplanations
from dynamo_plugin_frontend_openai.scoring import RerankEndpoint, ScoreEndpoint
from dynamo_plugin_frontend_openai.tokens import DetokenizeEndpoint, TokenizeEndpoint

#: Seconds that streams of ended requests get to let go of what they hold.
_CLOSE_TIMEOUT = 5.0


class OpenAIFrontend(Frontend):
    """The OpenAI-compatible API."""

    NAME = "openai"
    Config: ClassVar[type[PluginConfig]] = OpenAIConfig

    config: OpenAIConfig

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        super().__init__(config, services)
        self._tasks = TaskSet()
        self._giving_back: asyncio.Task[None] | None = None
        self._token_memory = token_memory(services)
        self._checker = SchemaChecker(services)
        templates = TemplateStore(self.config.template_timeout)
        self._chats = ChatDependencies(
            templates,
            hide_tools=self.config.exclude_tools_when_tool_choice_none,
            count_calls=call_counter(services),
        )

    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """The tokenizer of a model; all of them share one memory of prompts."""
        return load_tokenizer(kind, files, self._token_memory)

    @classmethod
    def describe_template(cls, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the forms of messages that a model's chat template reads; nothing if it has none."""
        return asyncio.run(describe_template(files))

    def routes(self) -> Iterable[HttpRoute]:
        """The routes, with their paths from the settings."""
        operations = self._operations()
        if not self.config.disable_admin_api:
            operations += self._for_operators()
        description = Description(self.config.openapi_path, self.config.docs_path, self.services.routes)
        return [operation.route for operation in description.with_own(operations)]

    def _for_operators(self) -> Iterable[Operation]:
        control = self.services.thresholds
        if control is not None:
            for route in BusyThresholds(self.services, control).routes():
                body = ThresholdRequest if route.method == "POST" else None
                yield Operation(
                    route, body, answer=ThresholdList if route.method == "GET" else ThresholdEntry, error=PlainError
                )
        for route in RouteExplanations(self.services, self._chats).routes():
            yield Operation(route)

    def _operations(self) -> list[Operation]:
        config, services = self.config, self.services
        chats = self._chats
        ignored = IgnoredFields(services, unknown=config.unknown_fields == "ignore")
        memory = AnswerMemory(services, config.unary_answer_limit_mb * MB, config.unary_answers_limit_mb * MB)
        answering = Answering(self._tasks, config.write_buffer, memory, self._checker)
        chat = ChatEndpoint(services, ignored, answering, chats)
        completions = CompletionEndpoint(services, ignored, answering)
        embeddings = EmbeddingEndpoint(services, ignored)
        score, rerank = ScoreEndpoint(services, ignored), RerankEndpoint(services, ignored)
        messages = MessagesEndpoint(services, ignored, answering, chats)
        counts = CountTokensEndpoint(services, ignored, chats)
        stored = response_memory(services, config)
        responses: ResponsesEndpoint = ResponsesEndpoint(services, ignored, answering, chats)
        input_tokens: InputTokensEndpoint = InputTokensEndpoint(services, ignored, chats)
        if stored is not None:
            responses = RememberingResponsesEndpoint(services, ignored, answering, chats, stored)
            input_tokens = RememberingInputTokensEndpoint(services, ignored, chats, stored)
        tokenize, detokenize = TokenizeEndpoint(services, ignored, chats), DetokenizeEndpoint(services, ignored)
        return [
            _post(config.chat_path, chat, schemas.ChatCompletion, "Chat completions, streaming or not"),
            _post(
                config.completions_path,
                completions,
                schemas.TextCompletion,
                "Text completions, streaming or not",
            ),
            _post(config.embeddings_path, embeddings, schemas.EmbeddingList, "Embeddings"),
            *(_post(path, score, schemas.ScoreList, "Scores of documents") for path in config.score_paths),
            *(_post(path, rerank, schemas.RankedList, "Documents by relevance") for path in config.rerank_paths),
            _post(
                config.messages_path,
                messages,
                anthropic_schemas.AnthropicMessage,
                "Messages of the Anthropic API, streaming or not",
            ),
            _post(
                f"{config.messages_path}/count_tokens",
                counts,
                anthropic_schemas.TokenCount,
                "How many tokens such a request has",
            ),
            _post(
                config.responses_path,
                responses,
                responses_schemas.WholeResponse,
                f"The Responses API with{'out' if stored is None else ''} a memory, streaming or not",
            ),
            _post(
                f"{config.responses_path}/input_tokens",
                input_tokens,
                responses_schemas.InputTokens,
                "How many tokens such a request has",
            ),
            _post(config.tokenize_path, tokenize, schemas.TokenizedText, "The tokens of a text"),
            _post(config.detokenize_path, detokenize, schemas.DetokenizedText, "The text of tokens"),
            *([] if stored is None else self._stored(stored)),
            *self._model_lists(),
        ]

    def _stored(self, memory: ResponseMemory) -> list[Operation]:
        routes = StoredResponses(memory)
        return routes.operations(self.config.responses_path, self.config.conversations_path)

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

    async def start(self) -> None:
        """Begins to give back memory that large requests took."""
        self._giving_back = self._tasks.spawn(give_back(), name="give-back-memory")

    async def aclose(self) -> None:
        """Waits a while for streams that are still being closed, then ends that too."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        await self._tasks.join(_CLOSE_TIMEOUT)
        await self._tasks.aclose()
        await self._chats.templates.aclose()
        await self._checker.aclose()


def _post(path: str, endpoint: ModelEndpoint[Any], answer: type[msgspec.Struct], summary: str) -> Operation:
    route = HttpRoute("POST", path, endpoint.handle, summary, respond_error=endpoint.respond_error)
    return Operation(
        route,
        endpoint.BODY,
        endpoint.PASSIVE,
        answer,
        streams=isinstance(endpoint, GenerationEndpoint),
        error=endpoint.ERROR,
    )
