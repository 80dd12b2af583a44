"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_core.protocol import CHAT
from dynamo_generation.endpoints.conversation import ConversationEndpoint, ParsedChat
from dynamo_generation.endpoints.parsed_request import Renderer
from dynamo_generation.prompts.preprocess import Prompt
from dynamo_generation.requests import fields
from dynamo_generation.requests.chat import ChatRequest

from dynamo_plugin_frontend_openai.render_chat import ChatRenderer

if TYPE_CHECKING:
    from dynamo_core import ReasoningParser, ServedModel, ToolCallParser
    from dynamo_generation.answers.render import Identity

    ParserT = TypeVar("ParserT", ToolCallParser, ReasoningParser)


class ParsedChatCompletion(ParsedChat):
    """A checked request of chat completions."""

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Return chat chunks and bodies."""
        wanted = self.chat.alternatives is not None
        renderer = ChatRenderer(identity, self.chat.choices * len(prompts), model.tokenizer, logprobs=wanted)
        return self.with_tokens(renderer, prompts, model, beside=True)


class ChatEndpoint(ConversationEndpoint[ParsedChatCompletion]):
    """Chat completions."""

    ENDPOINT = "chat_completions"
    MODEL_TYPE = CHAT
    BODY = ChatRequest
    PASSIVE = fields.CHAT
    ID_PREFIX = "chatcmpl-"

    def check(self, raw: dict[str, Any]) -> ParsedChatCompletion:
        """Check a chat body."""
        return ParsedChatCompletion(raw, self._chats)
