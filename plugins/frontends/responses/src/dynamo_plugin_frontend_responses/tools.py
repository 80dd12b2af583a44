"""Tools of the Responses API: their fields, and the functions that stand for them at a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from dynamo_generation.requests.generation_request import invalid
from dynamo_generation.requests.tools import ALLOWED, AUTO, FUNCTION

CUSTOM, NAMESPACE = "custom", "namespace"
#: The one parameter of the function that stands for a custom tool.
INPUT = "input"

_COMMANDS = {"type": "array", "items": {"type": "string"}}
_MILLISECONDS = {"type": "integer", "description": "Milliseconds after which it is stopped."}


@dataclass(frozen=True, slots=True)
class NativeTool:
    """A tool that the client runs and that is known by its type alone: models are shown a function of that name.

    Calls are items of the type `item` whose `key` holds the arguments; `always` is in there too.
    """

    item: str
    key: str
    prefix: str
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    always: Mapping[str, Any] = field(default_factory=dict)


NATIVE: Mapping[str, NativeTool] = {
    "local_shell": NativeTool(
        "local_shell_call",
        "action",
        "lsh_",
        "Runs a command on the user's machine and gives its output.",
        {
            "command": {**_COMMANDS, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": _MILLISECONDS,
        },
        ("command",),
        {"type": "exec", "env": {}},
    ),
    "shell": NativeTool(
        "shell_call",
        "action",
        "sh_",
        "Runs commands in a shell on the user's machine and gives their output.",
        {
            "commands": {**_COMMANDS, "description": "Commands, each a line of the shell."},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {"type": "integer", "description": "The most characters of output to give."},
        },
        ("commands",),
    ),
    "apply_patch": NativeTool(
        "apply_patch_call",
        "operation",
        "apc_",
        "Creates, changes or deletes a file of the user.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "The changes as a V4A diff; not for delete_file."},
        },
        ("type", "path"),
    ),
}

#: Tools that the server of the API would run itself, and that a model may do without: a request that offers them is
#: answered without them. Their types may end in a date.
HOSTED = ("web_search", "image_generation", "tool_search")


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call; `parameters` is a JSON Schema, `tools` those of a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None

    @property
    def hosted(self) -> bool:
        """Whether the server would run it, and nothing is lost but the offer."""
        return self.type.startswith(HOSTED)


class ChosenTool(msgspec.Struct, kw_only=True):
    """A tool of the allowed ones."""

    type: str
    name: str | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """The one tool that must be called, or the tools that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """The tool behind a function of the model: its type and name, perhaps in a namespace."""

    type: str
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request. `functions` are shown to the model, `called` maps each to its tool, by name."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    called: dict[str, ToolIdentity] = field(default_factory=dict)
    #: The places of tools that no model is shown.
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tools: Sequence[ResponseTool]) -> ResponseTools:
        """Return the functions for these tools.

        Raises:
            InvalidArgument: two of them would have one name.
        """
        made = cls()
        for index, tool in enumerate(tools):
            path = f"tools[{index}]"
            if tool.hosted:
                made.left_out.append(path)
            elif tool.type == NAMESPACE:
                for at, inner in enumerate(tool.tools or ()):
                    made._add(inner, f"{path}.tools[{at}]", tool.name)
            else:
                made._add(tool, path)
        return made

    def names_of(self, chosen: Iterable[ChosenTool]) -> list[str]:
        """Return the functions that stand for some tools."""
        wanted = {(each.type, each.name or each.type) for each in chosen}
        return [name for name, called in self.called.items() if (called.type, called.name) in wanted]

    def name_of(self, name: str, namespace: str | None = None) -> str:
        """Return the function that stands for a tool; the tool's own name if it is not among them."""
        for function, called in self.called.items():
            if called.name == name and (namespace is None or called.namespace == namespace):
                return function
        return shown_name(name, namespace)

    def _add(self, tool: ResponseTool, path: str, namespace: str | None = None) -> None:
        name = tool.name or tool.type
        function = shown_name(name, namespace)
        if function in self.called:
            raise invalid(f"Two tools have the name '{function}'", f"{path}.name")
        self.called[function] = ToolIdentity(tool.type, name, namespace)
        self.functions.append({"type": FUNCTION, FUNCTION: {"name": function, **_function(tool)}})


def shown_name(name: str, namespace: str | None) -> str:
    """Return what a model calls a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def check_tools(tools: Sequence[ResponseTool]) -> None:
    """Check the tools as far as they are not checked as functions.

    Raises:
        InvalidArgument: naming the field.
    """
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type == NAMESPACE:
            if not tool.name:
                raise invalid("A tool of type 'namespace' has no name", f"{path}.name")
            for at, inner in enumerate(tool.tools or ()):
                _check_named(inner, f"{path}.tools[{at}]")
        elif tool.type not in NATIVE and not tool.hosted:
            _check_named(tool, path)


def check_tool_choice(choice: str | ResponseToolChoice | None) -> None:
    """Check a choice as far as the tools are not needed for it.

    Raises:
        InvalidArgument: it is an object that names no tool.
    """
    if not isinstance(choice, ResponseToolChoice) or choice.type in NATIVE:
        return
    if choice.type == ALLOWED:
        if not choice.tools:
            raise invalid("A tool choice of type 'allowed_tools' has no tools", "tool_choice.tools")
    elif choice.type not in (FUNCTION, CUSTOM) or choice.name is None:
        raise invalid("A tool choice that is an object must name a function or a custom tool", "tool_choice")


def chosen(tools: ResponseTools, choice: str | ResponseToolChoice | None) -> Any:
    """Return a choice among the functions that stand for tools, in the form of the chat API.

    Raises:
        InvalidArgument: one of tools of which no model is shown any.
    """
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type != ALLOWED:
        return _named(tools.name_of(choice.name or choice.type))
    names = tools.names_of(choice.tools or ())
    if not names:
        raise invalid("The tool choice allows none of the tools", "tool_choice.tools")
    return {"type": ALLOWED, ALLOWED: {"mode": choice.mode or AUTO, "tools": [_named(name) for name in names]}}


def _named(name: str) -> dict[str, Any]:
    return {"type": FUNCTION, FUNCTION: {"name": name}}


def _check_named(tool: ResponseTool, path: str) -> None:
    if tool.type not in (FUNCTION, CUSTOM):
        raise invalid(f"Tools of type '{tool.type}' are not supported", f"{path}.type")
    if tool.name is None:
        raise invalid(f"A tool of type '{tool.type}' has no name", f"{path}.name")


def _function(tool: ResponseTool) -> dict[str, Any]:
    """Return the function that stands for a tool, but for its name."""
    native = NATIVE.get(tool.type)
    if native is not None:
        return {
            "description": native.description,
            "parameters": {"type": "object", "properties": native.properties, "required": list(native.required)},
        }
    if tool.type == CUSTOM:
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        return {"description": _with_grammar(tool), "parameters": parameters}
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _with_grammar(tool: ResponseTool) -> str:
    """Return the description of a custom tool.

    A grammar is told, not enforced: the input is a text inside JSON here.
    """
    about, wanted = tool.description or "", tool.format or {}
    definition = wanted.get("definition")
    if wanted.get("type") != "grammar" or not isinstance(definition, str):
        return about
    return f"{about}\n\nThe input follows this grammar ({wanted.get('syntax')}):\n{definition}".lstrip()
