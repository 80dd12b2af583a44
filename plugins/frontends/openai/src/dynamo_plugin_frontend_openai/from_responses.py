"""Requests of the Responses API as chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_plugin_frontend_openai.requests.responses import (
    CALL,
    REASONING,
    RESULT,
    ResponseItem,
    ResponsesRequest,
    ResponseTextFormat,
    ResponseTool,
    ResponseToolChoice,
    text_of,
)
from dynamo_plugin_frontend_openai.requests.tools import FUNCTION

#: What fields of the chat request are called in the Responses API, where that is not the same.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ASSISTANT = "assistant"


def chat_of_response(request: ResponsesRequest) -> dict[str, Any]:
    """The body of the chat request that asks for the same."""
    wanted = request.text.format if request.text else None
    chat = _given(
        model=request.model,
        messages=_messages(request),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        parallel_tool_calls=request.parallel_tool_calls,
        user=request.user,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        response_format=None if wanted is None else _format(wanted),
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_choice(request.tool_choice),
    )
    if request.stream:
        # The last event tells the usage.
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _choice(choice: str | ResponseToolChoice | None) -> str | dict[str, Any] | None:
    if isinstance(choice, ResponseToolChoice):
        return {"type": FUNCTION, FUNCTION: {"name": choice.name}}
    return choice


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = _given(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return {"type": FUNCTION, FUNCTION: function}


def _format(wanted: ResponseTextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = _given(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    return messages + list(_of_items(request.input))


def _of_items(items: Iterable[ResponseItem]) -> Iterable[dict[str, Any]]:
    """The messages. Items that one answer consists of, and a chat request has in one message, are put together."""
    answer: dict[str, Any] | None = None
    for item in items:
        if _of_answer(item):
            if answer is None or (item.kind == REASONING and _speaks(answer)):
                # Thoughts come first, so that those after something said begin another answer.
                if answer is not None:
                    yield answer
                answer = {"role": _ASSISTANT, "content": None}
            _add(answer, item)
            continue
        if answer is not None:
            yield answer
            answer = None
        if item.kind == RESULT:
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
        else:
            yield {"role": item.role, "content": text_of(item.content)}
    if answer is not None:
        yield answer


def _of_answer(item: ResponseItem) -> bool:
    return item.kind in (CALL, REASONING) or item.role == _ASSISTANT


def _speaks(answer: Mapping[str, Any]) -> bool:
    return answer["content"] is not None or "tool_calls" in answer


def _add(answer: dict[str, Any], item: ResponseItem) -> None:
    match item.kind:
        case "reasoning":
            thoughts = text_of(item.content) or text_of(item.summary)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thoughts
        case "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": FUNCTION, FUNCTION: function})
        case _:
            answer["content"] = (answer["content"] or "") + text_of(item.content)
