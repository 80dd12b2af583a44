"""Tools: the tool fields of a request, and the guided decoding for a forced call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from dynamo_core import GuidedDecodingOptions
from dynamo_core.errors import InvalidArgument

from dynamo_generation.bodies.decode import schema_error
from dynamo_generation.requests.generation_request import invalid

NONE, AUTO, REQUIRED = "none", "auto", "required"
FUNCTION, ALLOWED = "function", "allowed_tools"

_MAX_TOOLS = 1536
_NAME = re.compile(r"[A-Za-z0-9_-]{1,96}")


class Function(msgspec.Struct, kw_only=True):
    """A function that a model may call; `parameters` is a JSON Schema. Templates see it as the client sent it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool. Only functions reach engines that take tokens."""

    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, of those that the model is shown."""

    mode: Literal["auto", "required"] | None = None
    tools: list[NamedChoice] | None = None


class NamedChoice(msgspec.Struct, kw_only=True):
    """The one tool that must be called, or the tools that may be."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function call of an earlier answer; the arguments are JSON text, or already an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in a message of the assistant."""

    type: str | None = None
    id: str | None = None
    function: CalledFunction | None = None


ToolChoice: TypeAlias = str | NamedChoice


def forced_name(choice: ToolChoice | None) -> str | None:
    """Return the function that must be called, if one is named."""
    return choice.function.name if isinstance(choice, NamedChoice) and choice.function is not None else None


def mode_of(choice: ToolChoice | None) -> str:
    """Return whether a tool must be called, may be, or may not."""
    if not isinstance(choice, NamedChoice):
        return choice or AUTO
    if choice.allowed_tools is None:
        return REQUIRED
    return choice.allowed_tools.mode or AUTO


def allowed_names(choice: ToolChoice | None) -> frozenset[str] | None:
    """Return the functions that may be called; None if all may be."""
    if not isinstance(choice, NamedChoice) or choice.allowed_tools is None:
        return None
    return frozenset(each.function.name for each in choice.allowed_tools.tools or () if each.function is not None)


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> InvalidArgument | None:
    """Check tools and choice.

    Returns:
        The refusal of the first tool, or of a choice, that only engines know that take the client's body.

    Raises:
        InvalidArgument: naming the field.
    """
    if len(tools) > _MAX_TOOLS:
        raise invalid(f"Tools array must have at most {_MAX_TOOLS} items, got {len(tools)}", "tools")
    names = set()
    refusal: InvalidArgument | None = None
    for index, tool in enumerate(tools):
        if tool.function is not None:
            names.add(tool.function.name)
            if not _NAME.fullmatch(tool.function.name):
                raise invalid(
                    "The name of a function must have 1 to 96 letters, digits, underscores or dashes",
                    f"tools[{index}].function.name",
                )
        refusal = refusal or _refusal_of(tool, index)
    if isinstance(choice, str):
        if choice not in (NONE, AUTO, REQUIRED):
            raise schema_error(
                f"unknown choice {choice!r}, expected `none`, `auto`, `required` or an object - at `$.tool_choice`"
            )
        if choice == REQUIRED and not tools:
            raise invalid("tool_choice 'required' needs tools", "tool_choice")
    name = forced_name(choice)
    if name is not None and name not in names:
        raise invalid(f"tool_choice names the function '{name}', which is not among the tools", "tool_choice")
    for name in sorted((allowed_names(choice) or frozenset()) - names):
        raise invalid(f"tool_choice allows the function '{name}', which is not among the tools", "tool_choice")
    return refusal or _refusal_of_choice(choice)


def _refusal_of(tool: Tool, index: int) -> InvalidArgument | None:
    if tool.type != FUNCTION:
        return invalid(f"Tools of type '{tool.type}' are not supported by this model", f"tools[{index}].type")
    if tool.function is None:
        return invalid("A tool of type 'function' has no function", f"tools[{index}].function")
    return None


def _refusal_of_choice(choice: ToolChoice | None) -> InvalidArgument | None:
    if not isinstance(choice, NamedChoice):
        return None
    if choice.type == ALLOWED:
        named = choice.allowed_tools.tools if choice.allowed_tools is not None else None
        if not named or any(each.type != FUNCTION or each.function is None for each in named):
            return invalid("A tool choice of type 'allowed_tools' must name functions", "tool_choice")
    elif choice.type != FUNCTION or choice.function is None:
        return invalid("A tool choice that is an object must name a function", "tool_choice")
    return None


def guided(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> GuidedDecodingOptions | None:
    """Return what the answer must look like: the arguments of the named function, or a list of calls.

    None if it is free.

    Raises:
        InvalidArgument: definitions of two tools have one name and differ, so that no schema can hold both.
    """
    allowed = allowed_names(choice)
    functions = [
        tool.function
        for tool in tools
        if tool.function is not None and (allowed is None or tool.function.name in allowed)
    ]
    name = forced_name(choice)
    if name is not None:
        return GuidedDecodingOptions(json=next(_parameters(each) for each in functions if each.name == name))
    if mode_of(choice) != REQUIRED or not functions:
        return None
    definitions: dict[str, Any] = {}
    calls = [_call(function, definitions) for function in functions]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return GuidedDecodingOptions(json=schema)


def _call(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one call. References begin at the root of a schema, so definitions move there."""
    parameters = dict(_parameters(function))
    own = parameters.pop("$defs", None)
    for name, value in (own if isinstance(own, dict) else {}).items():
        if definitions.setdefault(name, value) != value:
            raise invalid(f"Two tools define '{name}' in $defs, and differently", "tools")
    return {
        "properties": {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
    }


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}
