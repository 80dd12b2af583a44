"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core.protocol.records import CHAT

from dynamo_plugin_frontend_openai.generation import Ask, GenerationEndpoint, Renderer
from dynamo_plugin_frontend_openai.preprocess import Prompt, chat_prompt
from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.chat import ChatRequest, check_text_only, parse_chat
from dynamo_plugin_frontend_openai.template import TemplateStore

if TYPE_CHECKING:
    from dynamo_core.contracts.frontend import FrontendServices, ServedModel
    from dynamo_core.tasks import TaskSet

    from dynamo_plugin_frontend_openai.render import Identity


class ChatAsk(Ask):
    """A checked chat request."""

    def __init__(self, raw: dict[str, Any], templates: TemplateStore) -> None:
        self.chat: ChatRequest = parse_chat(raw)
        super().__init__(raw, self.chat)
        self._templates = templates

    def check_for_tokens(self) -> None:
        """Refuses tools, pictures and the like."""
        fields.check_passive(self.raw, fields.CHAT)
        check_text_only(self.chat)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """The conversation as one prompt."""
        return [await chat_prompt(self.chat, self.raw, model, self._templates)]

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Chat chunks and bodies."""
        wanted = self.chat.alternatives is not None
        return ChatRenderer(identity, self.chat.choices * len(prompts), model.tokenizer, logprobs=wanted)


class ChatEndpoint(GenerationEndpoint[ChatAsk]):
    """Chat completions."""

    ENDPOINT = "chat_completions"
    MODEL_TYPE = CHAT
    ID_PREFIX = "chatcmpl-"

    def __init__(self, services: FrontendServices, tasks: TaskSet, write_buffer: int) -> None:
        super().__init__(services, tasks, write_buffer)
        self._templates = TemplateStore()

    def check(self, raw: dict[str, Any]) -> ChatAsk:
        """Checks a chat body."""
        return ChatAsk(raw, self._templates)
