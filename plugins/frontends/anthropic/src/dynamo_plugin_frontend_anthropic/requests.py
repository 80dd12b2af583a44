"""Requests of the Anthropic API: their fields, and the checks that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import U32, invalid

CUSTOM = "custom"
USER, ASSISTANT = "user", "assistant"
#: Tools that the server of the API would run itself, and that a model may do without. Their types end in a date.
_HOSTED = ("web_search_", "web_fetch_", "tool_search_tool_")


#: Of both Anthropic routes.
COUNT_TOKENS_PASSIVE: Mapping[str, fields.Accepts] = {
    "billing_policy": fields.anything,
    "cache_control": fields.anything,  # a hint for a cache that finds its prefixes by content here
    "compaction": fields.anything,  # the context is never changed here, as below
    "context_management": fields.anything,  # no edit is applied, and the answer says so
    "mcp_servers": fields.OneOf(None, []),
    "speed": fields.Documented("standard", "fast"),
    "thread": fields.NOTHING,
    "user_profile_id": fields.anything,
    "workspace_id": fields.anything,
}

MESSAGES_PASSIVE: Mapping[str, fields.Accepts] = {
    **COUNT_TOKENS_PASSIVE,
    "container": fields.NOTHING,
    "diagnostics": fields.anything,  # asks why a cache did not help; there is nothing to say
    "fallback_credit_token": fields.anything,
    "fallbacks": fields.anything,  # for refusals of the first model; models here do not refuse
    "inference_geo": fields.NOTHING,
    "metadata": fields.Notes(),  # identifies the end user; nothing here acts on it
    "service_tier": fields.Documented("auto", "standard_only"),
}


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer. The signature matters only where the thoughts were left out."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted thoughts; they are left out."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class SearchResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="search_result"):
    """A text that the client found."""

    title: str
    source: str
    content: list[TextBlock]


class TextSource(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """The text of a document."""

    data: str


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """A document that is text."""

    source: TextSource
    title: str | None = None
    context: str | None = None


class ToolReferenceBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool that the client's own search for tools found. Models are shown all tools anyway."""

    tool_name: str


ReadableBlock: TypeAlias = TextBlock | SearchResultBlock | DocumentBlock
ResultBlock: TypeAlias = ReadableBlock | ToolReferenceBlock


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


MessageBlock: TypeAlias = ReadableBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessageTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call; `input_schema` is a JSON Schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def hosted(self) -> bool:
        """Whether the server of the API would run it, and nothing is lost but the offer."""
        return self.type is not None and self.type.startswith(_HOSTED)


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """The tool to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """The switch for thinking first. The budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: U32 | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The effort, and the format of the answer. The budget of a task has no effect."""

    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """A conversation whose tokens are to be counted."""

    model: Annotated[str, NOT_EMPTY]
    messages: Annotated[list[InputMessage], NOT_EMPTY]
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    # Beyond the API, as vLLM has it.
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the client has begun the answer itself."""
        return self.messages[-1].role == ASSISTANT


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A conversation to be answered."""

    max_tokens: U32
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    # Beyond the API, as vLLM has it.
    cache_salt: str | None = None


def left_out(tools: Sequence[MessageTool]) -> list[str]:
    """Return the places of tools that no model is shown."""
    return [f"tools[{index}]" for index, tool in enumerate(tools) if tool.hosted]


RequestT = TypeVar("RequestT", bound=CountTokensRequest)


def parse_messages(raw: dict[str, Any], kind: type[RequestT], passive: Mapping[str, fields.Accepts]) -> RequestT:
    """Check a request of this kind, of which `passive` is the table of fields without effect.

    Ranges are checked when it is a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, kind)
    if not request.messages:
        raise invalid("at least one message is required", "messages")
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    if request.goes_on and not _only_text(request.messages[-1]):
        raise invalid(
            "a last message of the assistant is continued, and of what it can hold only text can be",
            f"messages[{len(request.messages) - 1}].content",
        )
    for index, tool in enumerate(request.tools or ()):
        if tool.hosted:
            continue
        if tool.type not in (None, CUSTOM):
            raise invalid(f"tools of type '{tool.type}' are not supported", f"tools[{index}].type")
        if tool.input_schema is None:
            raise invalid("a tool must have an input_schema", f"tools[{index}].input_schema")
    choice = request.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise invalid("a tool choice of type 'tool' must name one", "tool_choice.name")
    fields.refuse_fields(raw, request.__struct_fields__, passive)
    return request


def _only_text(message: InputMessage) -> bool:
    content = message.content
    return bool(content) and (isinstance(content, str) or all(isinstance(block, TextBlock) for block in content))


def _check_message(message: InputMessage, path: str) -> None:
    if isinstance(message.content, str):
        return
    for index, block in enumerate(message.content):
        belongs: str | None = None
        match block:
            case TextBlock():
                continue
            case ToolResultBlock() | SearchResultBlock() | DocumentBlock():
                belongs = USER
            case _:
                belongs = ASSISTANT
        if message.role != belongs:
            kind = block.__struct_config__.tag
            raise invalid(
                f"a block of type '{kind}' belongs in a message of role '{belongs}'", f"{path}.content[{index}].type"
            )
