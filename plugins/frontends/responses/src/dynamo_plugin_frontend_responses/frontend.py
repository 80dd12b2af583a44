"""`ResponsesFrontend`: the routes of the Responses API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from dynamo_core import PluginConfig
from dynamo_generation.api import Api, post
from dynamo_generation.endpoints.openapi import Operation

from dynamo_plugin_frontend_responses import schemas
from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_frontend_responses.endpoint import (
    InputTokensEndpoint,
    RememberingInputTokensEndpoint,
    RememberingResponsesEndpoint,
    ResponsesEndpoint,
)
from dynamo_plugin_frontend_responses.memory import response_memory
from dynamo_plugin_frontend_responses.routes import StoredResponses


class ResponsesFrontend(Api):
    """The Responses API, with a memory where the settings name a store."""

    NAME = "responses"
    USES_RESPONSE_STORE = True
    Config: ClassVar[type[PluginConfig]] = ResponsesConfig

    config: ResponsesConfig

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return the routes that there are without a store, too."""
        path = cast("ResponsesConfig", config).responses_path
        return (f"POST {path}", f"POST {path}/input_tokens")

    def operations(self) -> Iterable[Operation]:
        """Return the routes, and how their bodies are read."""
        config, services, generation = self.config, self.services, self.generation
        ignored, answering, chats = generation.ignored, generation.answering, generation.chats
        stored = response_memory(services, config)
        responses: ResponsesEndpoint = ResponsesEndpoint(services, ignored, answering, chats)
        input_tokens: InputTokensEndpoint = InputTokensEndpoint(services, ignored, chats)
        if stored is not None:
            responses = RememberingResponsesEndpoint(services, ignored, answering, chats, stored)
            input_tokens = RememberingInputTokensEndpoint(services, ignored, chats, stored)
        yield post(
            config.responses_path,
            responses,
            schemas.WholeResponse,
            f"The Responses API with{'out' if stored is None else ''} a memory, streaming or not",
        )
        counts = f"{config.responses_path}/input_tokens"
        yield post(counts, input_tokens, schemas.InputTokens, "How many tokens such a request has")
        if stored is not None:
            yield from StoredResponses(stored).operations(config.responses_path, config.conversations_path)
