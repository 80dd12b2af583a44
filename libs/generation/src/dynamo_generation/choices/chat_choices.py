"""The choices of an answer to a chat request: parsed as the model writes, and as the request asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_core import GUIDED

from dynamo_generation.choices.answer_grammar import answer_grammar
from dynamo_generation.choices.call_filter import CallFilter
from dynamo_generation.choices.choice import Choice, TokenChoice
from dynamo_generation.choices.forced_tool_calls import ForcedCalls
from dynamo_generation.choices.marker_tokens import MarkerStore, MarkerTokens
from dynamo_generation.choices.parsed_choice import AnswerParser, ParsedChoice, TextParser
from dynamo_generation.choices.schema_validation import CollectedAnswer
from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.tools import FUNCTION, allowed_names, forced_name

if TYPE_CHECKING:
    from dynamo_core import PreprocessedRequest, ReasoningParser, ServedModel, ToolCallParser
    from dynamo_text import StopStrings

    from dynamo_generation.prompts.prompt_metrics import ParserCounts

    ParserT = TypeVar("ParserT", ToolCallParser, ReasoningParser)


class ChatChoices:
    """Makes the choices of one request.

    `tools` are those of the request, as the client sent them. `call_ids` are the ids of earlier calls. `count_calls`
    counts calls that a model has written and that were not sound.
    """

    def __init__(
        self,
        chat: ChatRequest,
        tools: Sequence[Mapping[str, Any]],
        call_ids: Collection[str],
        markers: MarkerStore,
        count_calls: Callable[[ServedModel, ParserCounts], None],
    ) -> None:
        self._chat = chat
        self._allowed = allowed_names(chat.tool_choice)
        self._tools = tools
        #: Ids of the conversation and of all choices. A client takes a second call of one id for answered.
        self._call_ids = set(call_ids)
        self._markers = markers
        self._count_calls = count_calls

    def choice(
        self, index: int, request: PreprocessedRequest, prompt: str, model: ServedModel, stops: StopStrings | None
    ) -> Choice:
        """Return a choice that is parsed, if the model or the request asks for that; else one that is only text.

        May still change what the engine is asked.
        """
        chat, parsers = self._chat, model.parsers
        own = parsers.tools if chat.uses_tools else None
        kind = None if own is not None and own.TELLS_REASONING else parsers.reasoning
        reasoning = None if kind is None else kind(prompt)
        forced = chat.uses_tools and chat.must_call
        callable_tools = self._callable_tools() if chat.uses_tools else []
        answered: CollectedAnswer | None = None
        if chat.is_bound:
            grammar = None
            if GUIDED in model.card.capabilities:
                grammar = answer_grammar(chat, callable_tools, own, reasoning)
                request.sampling_options.guided_decoding = grammar
            answered = self._collected() if grammar is None else None
        if own is None and reasoning is None and answered is None and not forced:
            return TokenChoice(index, request, model.tokenizer, stops)
        markers = self._markers.find(model, own, kind)
        if markers.all_or_none or any(each is not None and each.NEEDS_SPECIAL_TOKENS for each in (own, kind)):
            request.output_options.skip_special_tokens = False
        tools: TextParser | None = None
        if own is not None:
            tools = _ready(own(callable_tools), markers)
        if forced:
            tools = ForcedCalls(forced_name(chat.tool_choice), tools)
        calls = CallFilter(self._allowed, parallel=chat.parallel, ids=self._call_ids)
        thoughts = None if reasoning is None else _ready(reasoning, markers)
        return ParsedChoice(
            index,
            request,
            model.tokenizer,
            AnswerParser(thoughts, tools, calls, whole=not chat.streaming),
            stops,
            answered,
            markers=markers,
            count_calls=partial(self._count_calls, model),
        )

    def _callable_tools(self) -> list[Mapping[str, Any]]:
        """Return the tools that may be called, as the client sent them."""
        allowed = self._allowed
        return [tool for tool in self._tools if allowed is None or tool[FUNCTION]["name"] in allowed]

    def _collected(self) -> CollectedAnswer | None:
        """Return what collects an answer that is validated at its end; None if there is nothing to validate."""
        chat = self._chat
        strict = {each.name: each.parameters for each in chat.callable_functions if each.strict and each.parameters}
        return CollectedAnswer(chat.value_schema, strict) if strict or chat.value_schema is not None else None


def _ready(parser: ParserT, markers: MarkerTokens) -> ParserT:
    """Return a parser that knows which of its markers are tokens."""
    tokens = markers.of(type(parser))
    if tokens:
        parser.has_marker_tokens(tokens)
    return parser
