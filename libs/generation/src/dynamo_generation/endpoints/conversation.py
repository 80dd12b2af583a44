"""Requests that chat, in whatever API: the conversation as a prompt, and answers that are parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_core import GUIDED

from dynamo_generation.answers.answering import Answering
from dynamo_generation.choices.answer_grammar import answer_grammar
from dynamo_generation.choices.call_filter import CallFilter
from dynamo_generation.choices.choice import Choice, TokenChoice
from dynamo_generation.choices.forced_tool_calls import ForcedCalls
from dynamo_generation.choices.marker_tokens import MarkerStore, MarkerTokens
from dynamo_generation.choices.parsed import AnswerParser, ParsedChoice, TextParser
from dynamo_generation.choices.schema_validation import CollectedAnswer
from dynamo_generation.endpoints.generation import GenerationEndpoint, ParsedRequest, ParsedT
from dynamo_generation.prompts.preprocess import Prompt, chat_prompt, fitting
from dynamo_generation.prompts.prompt_room import PromptRoom
from dynamo_generation.requests import fields
from dynamo_generation.requests.chat import ChatRequest, check_text_only, parse_chat
from dynamo_generation.requests.ignored import IgnoredFields
from dynamo_generation.requests.tools import FUNCTION, allowed_names, forced_name
from dynamo_generation.templates.template import TemplateStore

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ReasoningParser, ServedModel, ToolCallParser
    from dynamo_text import StopStrings

    from dynamo_generation.prompts.meters import ReadCalls

    ParserT = TypeVar("ParserT", ToolCallParser, ReasoningParser)


@dataclass(frozen=True, slots=True)
class ChatDependencies:
    """What all routes that chat have in common. `hide_tools` leaves tools out of a prompt if none may be called.

    `count_calls` counts calls that a model has written and that were not sound.
    """

    templates: TemplateStore
    hide_tools: bool
    count_calls: Callable[[ServedModel, ReadCalls], None]
    markers: MarkerStore = field(default_factory=MarkerStore)


class ParsedChat(ParsedRequest):
    """A checked chat request."""

    def __init__(self, raw: dict[str, Any], chats: ChatDependencies) -> None:
        self.chat: ChatRequest = parse_chat(raw)
        super().__init__(raw, self.chat)
        self._chats = chats
        #: The ids of calls in the conversation and in all choices. A client takes a second call of one id for answered.
        self._call_ids: set[str] = set()
        if self.chat.uses_tools:
            self._call_ids.update(
                call.id for message in self.chat.messages for call in message.tool_calls or () if call.id is not None
            )

    def check_for_tokens(self) -> None:
        """Refuses pictures, tools that are no functions, and the like."""
        fields.check_passive(self.raw, fields.CHAT)
        check_text_only(self.chat)

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """The conversation as one prompt."""
        return [fitting(await self.conversation(model), model, "messages")]

    async def conversation(self, model: ServedModel, *, counted: bool = False) -> Prompt:
        """The conversation as a prompt. One whose tokens are only `counted` may be longer than the context.

        Raises:
            InvalidArgument: naming the field.
        """
        shown = self.chat.uses_tools or (self.chat.tools and not self._chats.hide_tools)
        tools = self.raw["tools"] if shown else None
        return await chat_prompt(
            self.chat, self.raw, model, self._chats.templates, PromptRoom(model, "messages", counted=counted), tools
        )

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: Prompt, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """An answer that is parsed, if the model or the request asks for that; else one that is only text."""
        chat, parsers = self.chat, model.parsers
        own = parsers.tools if chat.uses_tools else None
        kind = None if own is not None and own.TELLS_REASONING else parsers.reasoning
        reasoning = None if kind is None else kind(prompt.text or "")
        forced = chat.uses_tools and chat.must_call
        callable_tools = self._callable_tools() if chat.uses_tools else []
        if chat.is_bound and GUIDED in model.card.capabilities:
            grammar = answer_grammar(chat, callable_tools, own, reasoning)
            request.sampling_options.guided_decoding = grammar
            answered = None if grammar is not None else self._answered()
        else:
            answered = self._answered() if chat.is_bound else None
        if own is None and reasoning is None and answered is None and not forced:
            return TokenChoice(index, request, model.tokenizer, stops)
        markers = self._chats.markers.find(model, own, kind)
        if markers.all_or_none or any(each is not None and each.NEEDS_SPECIAL_TOKENS for each in (own, kind)):
            request.output_options.skip_special_tokens = False
        tools: TextParser | None = None
        if own is not None:
            tools = _ready(own(callable_tools), markers)
        if forced:
            tools = ForcedCalls(forced_name(chat.tool_choice), tools)
        calls = CallFilter(allowed_names(chat.tool_choice), parallel=chat.parallel, ids=self._call_ids)
        thoughts = None if reasoning is None else _ready(reasoning, markers)
        parser = AnswerParser(thoughts, tools, calls, whole=not chat.streaming)
        return ParsedChoice(
            index,
            request,
            model.tokenizer,
            parser,
            stops,
            answered,
            markers=markers,
            count_calls=partial(self._chats.count_calls, model),
        )

    def _callable_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called, as the client sent them."""
        allowed = allowed_names(self.chat.tool_choice)
        return [tool for tool in self.raw["tools"] if allowed is None or tool[FUNCTION]["name"] in allowed]

    def _answered(self) -> CollectedAnswer | None:
        """What an answer is gathered in that has to be checked at its end; None if there is nothing to check."""
        chat = self.chat
        strict = {each.name: each.parameters for each in chat.callable_functions if each.strict and each.parameters}
        return CollectedAnswer(chat.value_schema, strict) if strict or chat.value_schema is not None else None


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
