"""Requests of the Responses API: their fields, and what is wrong with them as far as no model is needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from dynamo_core.errors import InvalidArgument

from dynamo_plugin_frontend_openai.requests import fields
from dynamo_plugin_frontend_openai.requests.common import U32, invalid
from dynamo_plugin_frontend_openai.requests.decode import NOT_EMPTY, to_struct
from dynamo_plugin_frontend_openai.requests.tools import FUNCTION

MESSAGE, CALL, RESULT, REASONING = "message", "function_call", "function_call_output", "reasoning"
_TEXT_PARTS = ("input_text", "output_text", "text")
_REFUSAL = "refusal"

#: Fields that ask for something that would have to be kept between requests, and what to do instead.
_STATE: Mapping[str, str] = {
    "previous_response_id": "send the whole conversation as `input`",
    "conversation": "send the whole conversation as `input`",
    "prompt": "send the text of the prompt as `instructions` or `input`",
    "store": "send `store: false`, or leave it out",
    "background": "wait for the answer, or stream it",
}


class ResponsePart(msgspec.Struct, kw_only=True):
    """A part of a content: text, or a refusal of an earlier answer."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponseItem(msgspec.Struct, kw_only=True):
    """An item of the input: a message, a call of an earlier answer, what the call gave, or earlier reasoning."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None

    @property
    def kind(self) -> str:
        """What the item is; one with a role and no type is a message."""
        return MESSAGE if self.type is None and self.role is not None else self.type or ""


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON Schema."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """The one function that must be called."""

    type: str
    name: str | None = None


class ResponseTextFormat(msgspec.Struct, kw_only=True):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the text."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseReasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the reasoning. It is given as it is, so that there is no summary to choose."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to stream. Padding is not made."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """A request for a response."""

    model: Annotated[str, NOT_EMPTY]
    input: Annotated[str | list[ResponseItem], NOT_EMPTY]
    instructions: str | None = None
    max_output_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def parse_responses(raw: dict[str, Any]) -> ResponsesRequest:
    """Checks a request; ranges are checked when it is a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, ResponsesRequest)
    if not request.input:
        raise invalid("The input cannot be empty", "input")
    fields.check_known(raw, ResponsesRequest.__struct_fields__, fields.RESPONSES)
    for name, instead in _STATE.items():
        if not fields.RESPONSES[name](raw.get(name)):
            raise InvalidArgument(
                f"Unsupported value of parameter `{name}`: nothing is stored between requests; {instead}", field=name
            )
    fields.check_passive(raw, fields.RESPONSES)
    if not isinstance(request.input, str):
        for index, item in enumerate(request.input):
            _check_item(item, f"input[{index}]")
    for index, tool in enumerate(request.tools or ()):
        if tool.type != FUNCTION:
            raise invalid(f"Tools of type '{tool.type}' are not supported", f"tools[{index}].type")
        if tool.name is None:
            raise invalid("A tool of type 'function' has no name", f"tools[{index}].name")
    choice = request.tool_choice
    if isinstance(choice, ResponseToolChoice) and (choice.type != FUNCTION or choice.name is None):
        raise invalid("A tool choice that is an object must name a function", "tool_choice")
    if request.text is not None and request.text.format is not None:
        _check_format(request.text.format)
    return request


def text_of(content: str | list[ResponsePart] | None) -> str:
    """The text of a content; its parts are one text."""
    if isinstance(content, list):
        return "".join((part.refusal if part.type == _REFUSAL else part.text) or "" for part in content)
    return content or ""


def _check_item(item: ResponseItem, path: str) -> None:
    match item.kind:
        case "message":
            if item.role is None:
                raise invalid("A message has no role", f"{path}.role")
            if item.content is None:
                raise invalid("A message has no content", f"{path}.content")
            _check_parts(item.content, f"{path}.content")
        case "function_call":
            _require(item, path, "call_id", "name", "arguments")
        case "function_call_output":
            _require(item, path, "call_id", "output")
            _check_parts(item.output, f"{path}.output")
        case "reasoning":
            return
        case "item_reference":
            raise invalid("Nothing is stored between requests: send the item itself", f"{path}.type")
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


def _check_format(wanted: ResponseTextFormat) -> None:
    if wanted.type == "json_schema" and (not wanted.name or wanted.schema is None):
        missing = "schema" if wanted.name else "name"
        raise invalid(f"A format of type 'json_schema' has no {missing}", f"text.format.{missing}")
