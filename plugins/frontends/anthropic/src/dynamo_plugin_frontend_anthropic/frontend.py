"""`AnthropicFrontend`: the routes of the Anthropic API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from dynamo_core import PluginConfig
from dynamo_generation.api import Api, post
from dynamo_generation.endpoints.openapi import Operation

from dynamo_plugin_frontend_anthropic import schemas
from dynamo_plugin_frontend_anthropic.config import AnthropicConfig
from dynamo_plugin_frontend_anthropic.endpoint import CountTokensEndpoint, MessagesEndpoint


class AnthropicFrontend(Api):
    """The Anthropic API: messages."""

    NAME = "anthropic"
    Config: ClassVar[type[PluginConfig]] = AnthropicConfig

    config: AnthropicConfig

    def operations(self) -> Iterable[Operation]:
        """Return the routes, and how their bodies are read."""
        path, services, generation = self.config.messages_path, self.services, self.generation
        messages = MessagesEndpoint(services, generation.ignored, generation.answering, generation.chats)
        counts = CountTokensEndpoint(services, generation.ignored, generation.chats)
        yield post(path, messages, schemas.AnthropicMessage, "Messages of the Anthropic API, streaming or not")
        yield post(f"{path}/count_tokens", counts, schemas.TokenCount, "How many tokens such a request has")
