"""Requests of the Responses API: their fields, and the checks that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from dynamo_core.errors import InvalidArgument
from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import U32, invalid

from dynamo_plugin_frontend_responses.tools import (
    NATIVE,
    ResponseTool,
    ResponseToolChoice,
    check_tool_choice,
    check_tools,
)

MESSAGE, CALL, REASONING = "message", "function_call", "reasoning"
#: An item that only names one of an earlier response.
REFERENCE = "item_reference"
#: A part of an answer that a client may ask for with `include`.
ENCRYPTED_REASONING = "reasoning.encrypted_content"
CUSTOM_CALL = "custom_tool_call"
#: Items that hold what a call gave.
RESULTS = frozenset({f"{CALL}_output", f"{CUSTOM_CALL}_output", *(f"{tool.item}_output" for tool in NATIVE.values())})
#: Items of calls of tools that are known by their type, and the field of each that holds the arguments.
NATIVE_CALLS: Mapping[str, str] = {tool.item: tool.key for tool in NATIVE.values()}
_TEXT_PARTS = ("input_text", "output_text", "text")
_REFUSAL = "refusal"

_OR_STORE = "or have the server set `frontend.response_store`"
#: Fields that ask for something that would have to be kept between requests, and what to do instead.
_STATE: Mapping[str, str] = {
    "previous_response_id": f"nothing is stored between requests; send the whole conversation as `input`, {_OR_STORE}",
    "conversation": f"nothing is stored between requests; send the whole conversation as `input`, {_OR_STORE}",
    "prompt": "prompts are not stored; send the text of the prompt as `instructions` or `input`",
    "background": "nothing runs behind a request; wait for the answer, or stream it",
}


RESPONSES_PASSIVE: Mapping[str, fields.Accepts] = {
    "access_programs": fields.anything,
    "background": fields.OneOf(None, False),
    "client_metadata": fields.anything,  # the client's own, as Codex sends it
    "context_management": fields.anything,  # the context is never compacted here
    "conversation": fields.NOTHING,
    "image": fields.anything,  # how pictures are made; there are none
    # Parts of answers that are not made here, but for the encrypted reasoning, which is, and the log-probabilities,
    # which are refused.
    "include": fields.ListOf(
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    ),
    "max_tool_calls": fields.anything,  # counts calls of tools that a server runs itself; there are none
    "moderation": fields.NOTHING,
    "previous_response_id": fields.NOTHING,
    "prompt": fields.NOTHING,
    "prompt_cache_key": fields.COMMON["prompt_cache_key"],
    "prompt_cache_options": fields.anything,
    "prompt_cache_retention": fields.anything,
    "safety_identifier": fields.COMMON["safety_identifier"],
    "service_tier": fields.COMMON["service_tier"],
    "store": fields.COMMON["store"],
    "top_logprobs": fields.OneOf(None, 0),
    "truncation": fields.Documented("auto", "disabled"),  # a prompt that is too long is refused with either
}

INPUT_TOKENS_PASSIVE: Mapping[str, fields.Accepts] = {
    "conversation": fields.NOTHING,
    "personality": fields.anything,  # one of the makers of the API's own models
    "previous_response_id": fields.NOTHING,
    "truncation": RESPONSES_PASSIVE["truncation"],
}

#: Where a store holds earlier responses these are no longer passive.
_REMEMBERED = frozenset({"conversation", "previous_response_id", "store"})
REMEMBERED_RESPONSES_PASSIVE: Mapping[str, fields.Accepts] = {
    name: accepts for name, accepts in RESPONSES_PASSIVE.items() if name not in _REMEMBERED
}
REMEMBERED_INPUT_TOKENS_PASSIVE: Mapping[str, fields.Accepts] = {
    name: accepts for name, accepts in INPUT_TOKENS_PASSIVE.items() if name not in _REMEMBERED
}


class ResponsePart(msgspec.Struct, kw_only=True):
    """A part of a content: text, or a refusal of an earlier answer."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponseItem(msgspec.Struct, kw_only=True):
    """An item of the input: a message, a call of an earlier answer, its result, or earlier reasoning."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    summary: list[ResponsePart] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """The type of the item; without one, an item with a role is a message, and one with an id a reference."""
        if self.type is not None:
            return self.type
        return MESSAGE if self.role is not None else REFERENCE if self.id is not None else ""


class ResponseTextFormat(msgspec.Struct, kw_only=True):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the text."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseReasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the reasoning, returned as given: only the effort has an effect."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of streams. Padding is not made."""

    include_obfuscation: bool | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """A request whose tokens are to be counted."""

    #: Whether items may be references to those of earlier responses.
    REFERENCES: ClassVar[bool] = False

    model: Annotated[str, NOT_EMPTY]
    input: Annotated[str | list[ResponseItem], NOT_EMPTY]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    # Beyond the API, as vLLM has it.
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """A request for a response."""

    max_output_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # Beyond the API: load testers ask for answers of a length, and vLLM has salts.
    ignore_eos: bool | None = None
    cache_salt: str | None = None


class ConversationParam(msgspec.Struct, kw_only=True):
    """A conversation that is named as an object."""

    id: str


class RememberedInputTokens(InputTokensRequest, kw_only=True):
    """A request whose tokens are to be counted, where a store holds earlier responses."""

    REFERENCES: ClassVar[bool] = True

    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None


class RememberedRequest(ResponsesRequest, kw_only=True):
    """A request for a response, where a store holds earlier ones."""

    REFERENCES: ClassVar[bool] = True

    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    store: bool | None = None


RequestT = TypeVar("RequestT", bound=InputTokensRequest)


def parse_responses(raw: dict[str, Any], kind: type[RequestT], passive: Mapping[str, fields.Accepts]) -> RequestT:
    """Check a request of this kind, of which `passive` is the table of fields without effect.

    Ranges are checked when it is a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, kind)
    if not request.input:
        raise invalid("The input cannot be empty", "input")
    refusal = fields.check_fields(raw, request.__struct_fields__, passive)
    for name in _STATE.keys() & passive.keys():
        if not passive[name](raw.get(name)):
            raise InvalidArgument(
                f"Unsupported value of parameter `{name}`: {_STATE[name]}",
                field=name,
            )
    fields.raise_found(refusal)
    if not isinstance(request.input, str):
        check_items(request.input, "input", references=request.REFERENCES)
    check_tools(request.tools or ())
    check_tool_choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        _check_format(request.text.format)
    return request


def text_of(content: str | list[ResponsePart] | None) -> str:
    """Return the text of a content; its parts are lines of one text."""
    if isinstance(content, list):
        return "\n".join((part.refusal if part.type == _REFUSAL else part.text) or "" for part in content)
    return content or ""


def text_of_output(output: str | list[dict[str, Any]] | dict[str, Any] | None) -> str:
    """Return what a call gave, as a model reads it: the text of text parts.

    JSON of what a tool known by its type gives.
    """
    if output is None or isinstance(output, str):
        return output or ""
    if isinstance(output, list) and all(part.get("type") in _TEXT_PARTS for part in output):
        return "\n".join(str(part.get("text") or "") for part in output)
    return msgspec.json.encode(output).decode()


def check_items(items: Sequence[ResponseItem], path: str, *, references: bool = False) -> None:
    """Check items at a path of a body.

    Raises:
        InvalidArgument: naming the field.
    """
    for index, item in enumerate(items):
        _check_item(item, f"{path}[{index}]", references=references)


def _check_item(item: ResponseItem, path: str, *, references: bool) -> None:
    match item.kind:
        case "message":
            if item.role is None:
                raise invalid("A message has no role", f"{path}.role")
            if item.content is None:
                raise invalid("A message has no content", f"{path}.content")
            _check_parts(item.content, f"{path}.content")
        case "function_call":
            _require(item, path, "call_id", "name", "arguments")
        case "custom_tool_call":
            _require(item, path, "call_id", "name", "input")
        case kind if kind in NATIVE_CALLS:
            _require(item, path, "call_id", NATIVE_CALLS[kind])
        case kind if kind in RESULTS:
            if item.call_id is None and item.id is None:
                raise invalid(f"An item of type '{kind}' has no call_id", f"{path}.call_id")
            _require(item, path, "output")
            _check_output(item.output, f"{path}.output")
        case "reasoning":
            return
        case "item_reference" if references:
            _require(item, path, "id")
        case "item_reference":
            raise invalid(f"Nothing is stored between requests: send the item itself, {_OR_STORE}", f"{path}.type")
        case kind:
            raise invalid(f"Items of type '{kind}' are not supported", f"{path}.type")


def _require(item: ResponseItem, path: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise invalid(f"An item of type '{item.kind}' has no {name}", f"{path}.{name}")


def _check_parts(content: str | list[ResponsePart] | None, path: str) -> None:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if part.type not in (*_TEXT_PARTS, _REFUSAL):
            raise invalid(f"Content of type '{part.type}' is not supported", f"{path}[{index}].type")


def _check_output(output: str | list[dict[str, Any]] | dict[str, Any] | None, path: str) -> None:
    """Refuse pictures and files. What has no type is the report of a tool that is known by its own type."""
    for index, part in enumerate(output if isinstance(output, list) else ()):
        kind = part.get("type")
        if kind is not None and kind not in _TEXT_PARTS:
            raise invalid(f"Content of type '{kind}' is not supported", f"{path}[{index}].type")


def _check_format(wanted: ResponseTextFormat) -> None:
    if wanted.type == "json_schema" and (not wanted.name or wanted.schema is None):
        missing = "schema" if wanted.name else "name"
        raise invalid(f"A format of type 'json_schema' has no {missing}", f"text.format.{missing}")
