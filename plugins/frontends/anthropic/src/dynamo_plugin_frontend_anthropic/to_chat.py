"""Requests of the Anthropic API as chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from dynamo_generation.requests.opaque_thoughts import unpack_thoughts
from dynamo_generation.requests.tools import AUTO, FUNCTION, NONE, REQUIRED

from dynamo_plugin_frontend_anthropic.requests import (
    ASSISTANT,
    USER,
    CountTokensRequest,
    DocumentBlock,
    InputMessage,
    MessageBlock,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    ReadableBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

#: What fields of the chat request are called in the Anthropic API, where that is not the same.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


def chat_of_messages(request: CountTokensRequest) -> dict[str, Any]:
    """Return the body of the chat request that asks for the same."""
    chat: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.goes_on:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = [_tool(tool) for tool in request.tools or () if not tool.hosted]
    if tools:
        chat["tools"] = tools
    if request.tool_choice is not None:
        _choose(chat, request.tool_choice)
    variables = _thinking(request.thinking) | (request.chat_template_kwargs or {})
    if variables:
        chat["chat_template_kwargs"] = variables
    config = request.output_config
    if config is not None and config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        chat["response_format"] = _format(config.format)
    if isinstance(request, MessagesRequest):
        _add_limits(chat, request)
    return chat


def _add_limits(chat: dict[str, Any], request: MessagesRequest) -> None:
    chat["max_tokens"] = request.max_tokens
    for name in ("temperature", "top_p", "top_k", "cache_salt"):
        value = getattr(request, name)
        if value is not None:
            chat[name] = value
    if request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.stream:
        # The last events tell the usage.
        chat |= {"stream": True, "stream_options": {"include_usage": True}}


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Return the wish as variables of templates, which engines that take text understand, too."""
    if thinking is None:
        return {}
    wish: dict[str, Any] = {"enable_thinking": thinking.type != "disabled"}
    if thinking.budget_tokens is not None:
        wish["thinking_budget"] = thinking.budget_tokens
    return wish


def _choose(chat: dict[str, Any], choice: MessageToolChoice) -> None:
    if choice.type == "tool":
        chat["tool_choice"] = {"type": FUNCTION, FUNCTION: {"name": choice.name}}
    else:
        chat["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": FUNCTION, FUNCTION: function}


def _format(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the chat API calls the same; anything it does not know is its own affair to refuse."""
    if wanted.get("type") != "json_schema":
        return dict(wanted)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for message in request.messages:
        messages += _message(message)
    return messages


def _message(message: InputMessage) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == ASSISTANT:
        return [_assistant(message.content)]
    if message.role == USER:
        return _user(message.content)
    return [{"role": message.role, "content": _text([each for each in message.content if isinstance(each, TextBlock)])}]


def _user(blocks: Sequence[MessageBlock]) -> list[dict[str, Any]]:
    """Return what the user says, and before or between it what calls gave."""
    messages: list[dict[str, Any]] = []
    text: list[ReadableBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock | SearchResultBlock | DocumentBlock):
            text.append(block)
        elif isinstance(block, ToolResultBlock):
            if text:
                messages.append({"role": "user", "content": _text(text)})
                text = []
            messages.append(_result(block))
    if text or not messages:
        messages.append({"role": "user", "content": _text(text)})
    return messages


def _result(block: ToolResultBlock) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
    # The chat API has no word for it; a template may.
    return {**result, "is_error": True} if block.is_error else result


def _assistant(blocks: Sequence[MessageBlock]) -> dict[str, Any]:
    text: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                text.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking or unpack_thoughts(block.signature))
            case ToolUseBlock():
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                calls.append({"id": block.id, "type": FUNCTION, FUNCTION: function})
            case _:
                continue
    message: dict[str, Any] = {"role": "assistant", "content": _text(text) if text or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Sequence[ResultBlock]) -> str:
    """Join text blocks as lines of one text, as the text parts of a chat message are."""
    return content if isinstance(content, str) else "\n".join(map(_readable, content))


def _readable(block: ResultBlock) -> str:
    match block:
        case SearchResultBlock():
            return f"{block.title} ({block.source})\n{_text(block.content)}"
        case DocumentBlock():
            return "\n".join(filter(None, (block.title, block.context, block.source.data)))
        case ToolReferenceBlock():
            return f"The tool {block.tool_name} is there to be called."
        case TextBlock():
            return block.text
