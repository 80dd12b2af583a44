"""`OpenAIFrontend`: the routes and what stands behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.frontend import Frontend, FrontendServices, HttpRoute
from dynamo_core.tasks import TaskSet

from dynamo_plugin_frontend_openai.chat import ChatEndpoint
from dynamo_plugin_frontend_openai.completions import CompletionEndpoint
from dynamo_plugin_frontend_openai.config import OpenAIConfig
from dynamo_plugin_frontend_openai.embeddings import EmbeddingEndpoint
from dynamo_plugin_frontend_openai.models import ModelLists

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

    def routes(self) -> Iterable[HttpRoute]:
        """The routes, with their paths from the settings."""
        config, services = self.config, self.services
        chat = ChatEndpoint(services, self._tasks, config.write_buffer)
        completions = CompletionEndpoint(services, self._tasks, config.write_buffer)
        embeddings = EmbeddingEndpoint(services)
        lists = ModelLists(services.models)
        return [
            HttpRoute("POST", config.chat_path, chat.handle, "Chat completions, streaming or not"),
            HttpRoute("POST", config.completions_path, completions.handle, "Text completions, streaming or not"),
            HttpRoute("POST", config.embeddings_path, embeddings.handle, "Embeddings"),
            HttpRoute("GET", config.models_path, lists.openai, "All models"),
            HttpRoute("GET", f"{config.models_path}/{{id:.+}}", lists.one, "One model"),
            HttpRoute("GET", config.list_models_path, lists.extended, "All models with their public facts"),
        ]

    async def aclose(self) -> None:
        """Waits a while for streams that are still being closed, then ends that too."""
        await self._tasks.join(_CLOSE_TIMEOUT)
        await self._tasks.aclose()
