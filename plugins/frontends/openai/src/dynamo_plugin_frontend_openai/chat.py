"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_core.protocol import CHAT

from dynamo_plugin_frontend_openai import asking
from dynamo_plugin_frontend_openai.answering import Answering
from dynamo_plugin_frontend_openai.choices import Choice, TokenChoice
from dynamo_plugin_frontend_openai.forced import ForcedCalls
from dynamo_plugin_frontend_openai.generation import GenerationEndpoint, ParsedRequest, ParsedT, Renderer
from dynamo_plugin_frontend_openai.ignored import IgnoredFields
from dynamo_plugin_frontend_openai.markers import MarkerStore, MarkerTokens
from dynamo_plugin_frontend_openai.parsed import AnswerParser, ParsedChoice, TextParser
from dynamo_plugin_frontend_openai.preprocess import Prompt, chat_prompt, fitting
from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.chat import ChatRequest, check_text_only, parse_chat
from dynamo_plugin_frontend_openai.requests.tools import forced_name
from dynamo_plugin_frontend_openai.template import TemplateStore

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ReasoningParser, ServedModel, ToolCallParser
    from dynamo_text import StopStrings

    from dynamo_plugin_frontend_openai.render import Identity

    ParserT = TypeVar("ParserT", ToolCallParser, ReasoningParser)


@dataclass(frozen=True, slots=True)
class ChatDependencies:
    """What all routes that chat have in common. `hide_tools` leaves tools out of a prompt if none may be called.

    `report_malformed` counts calls that a model has written and that were not sound.
    """

    templates: TemplateStore
    hide_tools: bool
    report_malformed: Callable[[ServedModel, int], None]
    markers: MarkerStore = field(default_factory=MarkerStore)


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
        reasoning = None if own is not None and own.TELLS_REASONING else parsers.reasoning
        forced = chat.uses_tools and chat.must_call
        if own is None and reasoning is None and not forced:
            return TokenChoice(index, request, model.tokenizer, stops)
        markers = self._chats.markers.find(model, own, reasoning)
        if markers.all_or_none or any(each is not None and each.NEEDS_SPECIAL_TOKENS for each in (own, reasoning)):
            request.output_options.skip_special_tokens = False
        tools: TextParser | None = None
        if own is not None:
            tools = _ready(own(self.raw["tools"]), markers)
        if forced:
            tools = ForcedCalls(forced_name(chat.tool_choice), tools)
        parser = AnswerParser(
            None if reasoning is None else _ready(reasoning(prompt.text or ""), markers),
            tools,
            parallel=chat.parallel,
            whole=not chat.streaming,
        )
        return ParsedChoice(
            index,
            request,
            model.tokenizer,
            parser,
            stops,
            markers=markers,
            report_malformed=partial(self._chats.report_malformed, model),
        )

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> Renderer:
        """Chat chunks and bodies."""
        wanted = self.chat.alternatives is not None
        renderer = ChatRenderer(identity, self.chat.choices * len(prompts), model.tokenizer, logprobs=wanted)
        return self.with_tokens(renderer, prompts, model, beside=True)


def _ready(parser: ParserT, markers: MarkerTokens) -> ParserT:
    """A parser that knows which of its markers are tokens."""
    tokens = markers.of(type(parser))
    if tokens:
        parser.has_marker_tokens(tokens)
    return parser


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
