"""Requests of the Responses API as chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from dynamo_generation.requests.opaque_thoughts import unpack_thoughts
from dynamo_generation.requests.tools import FUNCTION

from dynamo_plugin_frontend_responses.requests import (
    CALL,
    CUSTOM_CALL,
    NATIVE_CALLS,
    REASONING,
    RESULTS,
    InputTokensRequest,
    ResponseItem,
    ResponsesRequest,
    ResponseTextFormat,
    text_of,
    text_of_output,
)
from dynamo_plugin_frontend_responses.tools import INPUT, NATIVE, ResponseTools, chosen

#: What fields of the chat request are called in the Responses API, where that is not the same.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ASSISTANT = "assistant"
_CALLS = frozenset({CALL, CUSTOM_CALL, *NATIVE_CALLS})


#: The types of tools by those of the items of their calls.
_NATIVE_TYPES = {tool.item: kind for kind, tool in NATIVE.items()}


def chat_of_response(request: InputTokensRequest, tools: ResponseTools) -> dict[str, Any]:
    """Return the body of the chat request that asks for the same; `tools` are those of the request."""
    wanted = request.text.format if request.text else None
    chat = _given(
        model=request.model,
        messages=_messages(request, tools),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
        response_format=None if wanted is None else _format(wanted),
        tools=tools.functions or None,
        tool_choice=chosen(tools, request.tool_choice),
    )
    if isinstance(request, ResponsesRequest):
        chat |= _given(
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            user=request.user,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
        )
        if request.stream:
            # The last event tells the usage.
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _format(wanted: ResponseTextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = _given(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: InputTokensRequest, tools: ResponseTools) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    return messages + list(_of_items(request.input, tools))


def _of_items(items: Iterable[ResponseItem], tools: ResponseTools) -> Iterable[dict[str, Any]]:
    """Yield the messages.

    Items that one answer consists of, and a chat request has in one message, are put together.
    """
    answer: dict[str, Any] | None = None
    for item in items:
        if _of_answer(item):
            if answer is None or (item.kind == REASONING and _speaks(answer)):
                # Thoughts come first, so that those after something said begin another answer.
                if answer is not None:
                    yield answer
                answer = {"role": _ASSISTANT, "content": None}
            _add(answer, item, tools)
            continue
        if answer is not None:
            yield answer
            answer = None
        if item.kind in RESULTS:
            yield {"role": "tool", "tool_call_id": item.call_id or item.id, "content": text_of_output(item.output)}
        else:
            yield {"role": item.role, "content": text_of(item.content)}
    if answer is not None:
        yield answer


def _of_answer(item: ResponseItem) -> bool:
    return item.kind in _CALLS or item.kind == REASONING or item.role == _ASSISTANT


def _speaks(answer: Mapping[str, Any]) -> bool:
    return answer["content"] is not None or "tool_calls" in answer


def _add(answer: dict[str, Any], item: ResponseItem, tools: ResponseTools) -> None:
    if item.kind in _CALLS:
        name, arguments = _called(item, tools)
        call = {"id": item.call_id, "type": FUNCTION, FUNCTION: {"name": name, "arguments": arguments}}
        answer.setdefault("tool_calls", []).append(call)
    elif item.kind == REASONING:
        thoughts = text_of(item.content) or unpack_thoughts(item.encrypted_content) or text_of(item.summary)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thoughts
    else:
        answer["content"] = (answer["content"] or "") + text_of(item.content)


def _called(item: ResponseItem, tools: ResponseTools) -> tuple[str, str]:
    """Return the function that a call of an earlier answer called, and its arguments as JSON."""
    if item.kind in NATIVE_CALLS:
        return tools.name_of(_NATIVE_TYPES[item.kind]), _json(getattr(item, NATIVE_CALLS[item.kind]))
    name = tools.name_of(item.name or "", item.namespace)
    return name, item.arguments or "" if item.kind == CALL else _json({INPUT: item.input})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
