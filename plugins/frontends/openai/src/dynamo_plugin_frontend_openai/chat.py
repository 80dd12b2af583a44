"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_core.protocol import CHAT

from dynamo_plugin_frontend_openai import asking
from dynamo_plugin_frontend_openai.answering import Answering
from dynamo_plugin_frontend_openai.choices import Choice, TokenChoice
from dynamo_plugin_frontend_openai.forced import ForcedCalls
from dynamo_plugin_frontend_openai.generation import GenerationEndpoint, ParsedRequest, ParsedT, Renderer
from dynamo_plugin_frontend_openai.ignored import IgnoredFields
from dynamo_plugin_frontend_openai.parsed import AnswerParser, ParsedChoice, TextParser
from dynamo_plugin_frontend_openai.preprocess import Prompt, chat_prompt, fitting
from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.chat import ChatRequest, check_text_only, parse_chat
from dynamo_plugin_frontend_openai.requests.tools import forced_name
from dynamo_plugin_frontend_openai.template import TemplateStore

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ServedModel
    from dynamo_text import StopStrings

    from dynamo_plugin_frontend_openai.render import Identity


@dataclass(frozen=True, slots=True)
class ChatDependencies:
    """What all routes that chat have in common. `hide_tools` leaves tools out of a prompt if none may be called."""

    templates: TemplateStore
    hide_tools: bool


class ParsedChat(ParsedRequest):
    """A checked chat request."""

    def __init__(self, raw: dict[str, Any], chats: ChatDependencies) -> None:
        self.chat: ChatRequest = parse_chat(raw)
        super().__init__(raw, self.chat)
        self._chats = chats

    def check_for_tokens(self) -> None:
        """Refuses pictures, tools that are no functions, and the like."""
        fields.check_passive(self.raw, fields.CHAT)
        check_text_only(self.chat)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """The conversation as one prompt."""
        return [fitting(await self.conversation(model), model, "messages")]

    async def conversation(self, model: ServedModel) -> Prompt:
        """The conversation as a prompt, however long.

        Raises:
            InvalidArgument: naming the field.
        """
        shown = self.chat.uses_tools or (self.chat.tools and not self._chats.hide_tools)
        tools = self.raw["tools"] if shown else None
        return await chat_prompt(self.chat, self.raw, model, self._chats.templates, tools)

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: Prompt, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """An answer that is parsed, if the model or the request asks for that; else one that is only text."""
        chat, parsers = self.chat, model.parsers
        own = parsers.tools if chat.uses_tools else None
        reasoning = parsers.reasoning
        forced = chat.uses_tools and chat.must_call
        if own is None and reasoning is None and not forced:
            return TokenChoice(index, request, model.tokenizer, stops)
        if any(each is not None and each.NEEDS_SPECIAL_TOKENS for each in (own, reasoning)):
            request.output_options.skip_special_tokens = False
        tools: TextParser | None = None if own is None else own(self.raw["tools"])
        if forced:
            tools = ForcedCalls(forced_name(chat.tool_choice), tools)
        parser = AnswerParser(
            None if reasoning is None else reasoning(prompt.text or ""),
            tools,
            parallel=chat.parallel,
            whole=not chat.streaming,
        )
        return ParsedChoice(index, request, model.tokenizer, parser, stops)

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Chat chunks and bodies."""
        wanted = self.chat.alternatives is not None
        renderer = ChatRenderer(identity, self.chat.choices * len(prompts), model.tokenizer, logprobs=wanted)
        return self.with_tokens(renderer, prompts, model, beside=True)


class ConversationEndpoint(GenerationEndpoint[ParsedT]):
    """A route that chats, in whatever API."""

    def __init__(
        self, services: FrontendServices, ignored: IgnoredFields, answering: Answering, chats: ChatDependencies
    ) -> None:
        super().__init__(services, ignored, answering)
        self._chats = chats


class ChatEndpoint(ConversationEndpoint[ParsedChat]):
    """Chat completions."""

    ENDPOINT = "chat_completions"
    MODEL_TYPE = CHAT
    BODY = ChatRequest
    PASSIVE = fields.CHAT
    USER = asking.USER
    SESSION = asking.SESSION
    ID_PREFIX = "chatcmpl-"

    def check(self, raw: dict[str, Any]) -> ParsedChat:
        """Checks a chat body."""
        return ParsedChat(raw, self._chats)
