"""Chat completion requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from dynamo_core import GuidedDecodingOptions
from dynamo_core.errors import InvalidArgument

from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import (
    U32,
    GenerationRequest,
    check_common,
    check_range,
    check_token_limit,
    invalid,
)
from dynamo_generation.requests.messages import Message, is_long, review
from dynamo_generation.requests.thinking import SWITCHES, ThinkingRequest
from dynamo_generation.requests.tools import (
    NONE,
    REQUIRED,
    Function,
    Tool,
    ToolChoice,
    allowed_names,
    check_tools,
    guided,
    mode_of,
)

DISABLED = "disabled"
#: Variables of a template that a request may not set, because the frontend does.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """The switch for thinking first, in the form of several servers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: U32 | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A chat completion request."""

    messages: Annotated[list[Message], NOT_EMPTY]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != NONE

    @property
    def parallel(self) -> bool:
        """Whether one answer may have several calls."""
        return self.parallel_tool_calls is not False

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a tool."""
        return mode_of(self.tool_choice) == REQUIRED

    @property
    def callable_functions(self) -> list[Function]:
        """The functions that the model may call."""
        allowed = allowed_names(self.tool_choice)
        functions = [tool.function for tool in self.tools or () if self.uses_tools and tool.function is not None]
        return [each for each in functions if allowed is None or each.name in allowed]

    @property
    def guided(self) -> GuidedDecodingOptions | None:
        """The constraint of the answer: calls, if a tool must be called; else as the client says.

        None for an answer that is calls or a value: whether an engine can be asked for that depends on the model.
        """
        if self.must_call:
            return guided(self.tools or (), self.tool_choice, parallel=self.parallel)
        return None if self.uses_tools else super().guided

    @property
    def is_bound(self) -> bool:
        """Whether the answer cannot be just any text and calls."""
        return (
            (self.uses_tools and (self.must_call or not self.parallel))
            or super().guided is not None
            or any(function.strict for function in self.callable_functions)
        )

    @property
    def value_schema(self) -> dict[str, Any] | bool | None:
        """The schema of an answer without calls; None if it is text."""
        found = None if self.must_call else super().guided
        return None if found is None else found.json

    @property
    def token_limit(self) -> int | None:
        """The wished number of output tokens at most; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives per token to report; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the client adds to those of the template."""
        return {**(self.chat_template_args or {}), **(self.chat_template_kwargs or {})}

    @property
    def wish(self) -> ThinkingRequest:
        """The client's wish for thinking, from any of its fields: the one closest to the template wins."""
        given = self.template_variables
        switch = next((given[name] for name in SWITCHES if isinstance(given.get(name), bool)), self.enable_thinking)
        budget = None
        if isinstance(self.thinking, ThinkingSwitch):
            budget = self.thinking.budget_tokens
            switch = self.thinking.type != DISABLED if switch is None else switch
        elif switch is None:
            switch = self.thinking
        return ThinkingRequest(switch, self.reasoning_effort, budget)


@dataclass(slots=True)
class CheckedChat:
    """A checked request, and what was found out on the way."""

    request: ChatRequest
    #: Why it cannot be asked of an engine that takes tokens; None if it can.
    refusal: InvalidArgument | None
    #: The ids of earlier calls.
    call_ids: Sequence[str]
    #: Whether a template takes long for its messages.
    long: bool


def parse_chat(raw: dict[str, Any]) -> CheckedChat:
    """Check a chat request as far as no model is needed for it, in the documented order.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, ChatRequest)
    found = review(request.messages)
    if not request.messages:
        raise invalid("The 'messages' field cannot be empty. At least one message is required.", "messages")
    refusal = fields.check_fields(raw, ChatRequest.__struct_fields__, fields.CHAT)
    check_common(request)
    check_token_limit(request.max_completion_tokens, "Max completion tokens", "max_completion_tokens")
    check_range(request.top_logprobs, 0, 20, "Top_logprobs", "top_logprobs")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.continue_final_message:
        _check_continuation(request)
    for name in request.template_variables:
        if name in _RESERVED or name == "chat_template":
            raise invalid(f"The template variable '{name}' cannot be set", "chat_template_kwargs")
    fields.raise_found(found.fault)
    if request.tools or request.tool_choice is not None:
        of_tools = check_tools(request.tools or (), request.tool_choice)
        refusal = refusal or of_tools
    refusal = refusal or _calls_with_constraint(request) or found.refusal
    call_ids = found.call_ids if request.uses_tools else ()
    return CheckedChat(request, refusal, call_ids, is_long(request.messages, found))


def _check_continuation(request: ChatRequest) -> None:
    if request.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt ask for different ends of the prompt; give one of them",
            "continue_final_message",
        )
    if request.messages[-1].role != "assistant" or not request.messages[-1].content:
        raise invalid(
            "continue_final_message needs a last message of the assistant that has content", "continue_final_message"
        )


def _calls_with_constraint(request: ChatRequest) -> InvalidArgument | None:
    """Refuse tools beside a constraint of the text other than `response_format`, whose value is JSON as calls are."""
    found = request.constraint if request.uses_tools else None
    if found is None or found[0] == "response_format":
        return None
    return invalid(f"{found[0]} cannot be combined with tools that may be called; set tool_choice to 'none'", found[0])
