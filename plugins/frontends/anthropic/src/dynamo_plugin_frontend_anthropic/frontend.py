"""`AnthropicFrontend`: the routes of the Anthropic API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from dynamo_core import PluginConfig
from dynamo_generation.api import Api, post
from dynamo_generation.endpoints.openapi import Operation

from dynamo_plugin_frontend_anthropic import schemas
from dynamo_plugin_frontend_anthropic.config import AnthropicConfig
from dynamo_plugin_frontend_anthropic.endpoint import CountTokensEndpoint, MessagesEndpoint
from dynamo_plugin_frontend_anthropic.models import VERSION, ModelLists


class AnthropicFrontend(Api):
    """The Anthropic API: messages."""

    NAME = "anthropic"
    Config: ClassVar[type[PluginConfig]] = AnthropicConfig

    config: AnthropicConfig

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return the routes; the lists of models are for clients of this API."""
        config = cast("AnthropicConfig", config)
        yield f"POST {config.messages_path}"
        yield f"POST {config.messages_path}/count_tokens"
        yield f"GET {config.models_path} {VERSION}"
        yield f"GET {config.models_path}/{{id:.+}} {VERSION}"

    def operations(self) -> Iterable[Operation]:
        """Return the routes, and how their bodies are read."""
        path, services, generation = self.config.messages_path, self.services, self.generation
        messages = MessagesEndpoint(services, generation.ignored, generation.answering, generation.chats)
        counts = CountTokensEndpoint(services, generation.ignored, generation.chats)
        yield post(path, messages, schemas.AnthropicMessage, "Messages of the Anthropic API, streaming or not")
        yield post(f"{path}/count_tokens", counts, schemas.TokenCount, "How many tokens such a request has")
        yield from ModelLists(services).operations(self.config.models_path)
