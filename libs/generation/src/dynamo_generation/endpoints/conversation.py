"""The base of chat requests of every API: the conversation as a prompt, and a parsed answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_generation.answers.answer_services import Answering
from dynamo_generation.choices.chat_choices import ChatChoices
from dynamo_generation.choices.choice import Choice
from dynamo_generation.choices.marker_tokens import MarkerStore
from dynamo_generation.endpoints.generation import GenerationEndpoint, ParsedT
from dynamo_generation.endpoints.parsed_request import ParsedRequest
from dynamo_generation.prompts.preprocess import Prompt, chat_prompt, fitting
from dynamo_generation.prompts.prompt_budget import PromptBudget
from dynamo_generation.requests.chat import ChatRequest, parse_chat
from dynamo_generation.requests.ignored_fields import IgnoredFields
from dynamo_generation.templates.template import TemplateStore

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ServedModel
    from dynamo_text import StopStrings

    from dynamo_generation.prompts.prompt_metrics import ParserCounts


@dataclass(frozen=True, slots=True)
class ChatDependencies:
    """The shared services of chat routes. `hide_tools` leaves tools out of a prompt if none may be called.

    `count_calls` counts calls that a model has written and that were not sound.
    """

    templates: TemplateStore
    hide_tools: bool
    count_calls: Callable[[ServedModel, ParserCounts], None]
    markers: MarkerStore = field(default_factory=MarkerStore)


class ParsedChat(ParsedRequest):
    """A checked chat request."""

    def __init__(self, raw: dict[str, Any], chats: ChatDependencies) -> None:
        self._checked = parse_chat(raw)
        self.chat: ChatRequest = self._checked.request
        super().__init__(raw, self.chat, self._checked.refusal)
        self._templates = chats.templates
        shown = self.chat.uses_tools or (self.chat.tools and not chats.hide_tools)
        self._shown_tools = raw["tools"] if shown else None
        self._choices = ChatChoices(
            self.chat, raw.get("tools") or (), self._checked.call_ids, chats.markers, chats.count_calls
        )

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Return the conversation as one prompt."""
        return [fitting(await self.conversation(model), model, "messages")]

    async def conversation(self, model: ServedModel, *, counted: bool = False) -> Prompt:
        """Return the conversation as a prompt. One whose tokens are only `counted` may be longer than the context.

        Raises:
            InvalidArgument: naming the field.
        """
        room = PromptBudget(model, "messages", counted=counted)
        return await chat_prompt(self._checked, self.raw, model, self._templates, room, self._shown_tools)

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: Prompt, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """Return an answer that is parsed, if the model or the request asks for that; else one that is only text."""
        return self._choices.choice(index, request, prompt.text or "", model, stops)


class ConversationEndpoint(GenerationEndpoint[ParsedT]):
    """A route that chats, in whatever API."""

    def __init__(
        self, services: FrontendServices, ignored: IgnoredFields, answering: Answering, chats: ChatDependencies
    ) -> None:
        super().__init__(services, ignored, answering)
        self._chats = chats
