"""Requests of Ollama's API as chat requests, and as text completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from dynamo_generation.requests.generation_request import invalid
from dynamo_generation.requests.tools import FUNCTION

from dynamo_plugin_frontend_ollama.requests import (
    OllamaCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)

#: What fields of the chat request are called in Ollama's API, where that is not the same.
CHAT_NAMES: Mapping[str, str] = {
    **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
GENERATE_NAMES: Mapping[str, str] = {**CHAT_NAMES, "messages": "prompt"}

_AS_THEY_ARE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
#: How the base64 of pictures begins.
_PICTURES = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp"}
#: Stands for the conversation of a request that asks nothing.
_NOTHING = [{"role": "user", "content": ""}]


def chat_of_messages(request: OllamaChatRequest) -> dict[str, Any]:
    """Return the body of the chat request that asks for the same."""
    chat = _asked(request) | {"messages": _messages(request.messages or ()) or _NOTHING}
    if request.tools:
        chat["tools"] = [{"type": FUNCTION, **tool} for tool in request.tools]
    last = request.messages[-1] if request.messages else None
    if last is not None and last.role == "assistant" and last.content and not last.tool_calls:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return _thinking(chat, request)


def chat_of_prompt(request: OllamaGenerateRequest) -> dict[str, Any]:
    """Return the body of the chat request that asks for the same: the prompt is what a user says."""
    messages = [] if not request.system else [{"role": "system", "content": request.system}]
    user = {"role": "user", "content": _content(request.prompt or "", request.images)}
    return _thinking(_asked(request) | {"messages": [*messages, user]}, request)


def completion_of_prompt(request: OllamaGenerateRequest) -> dict[str, Any]:
    """Return the body of the text completion that asks for the same, where there is no chat template."""
    if request.images:
        raise invalid("a prompt without a chat template has no images", "images")
    return _asked(request) | {"prompt": "\n".join(filter(None, (request.system, request.prompt)))}


def _asked(request: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """Return what both kinds of request ask for."""
    asked: dict[str, Any] = {"model": request.model, **_sampling(request.options or OllamaOptions())}
    if request.stream is not False:
        # The last line tells the usage.
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    match request.format:
        case None | "":
            pass
        case "json":
            asked["response_format"] = {"type": "json_object"}
        case dict(schema):
            asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        case _:
            raise invalid('format must be "json" or a JSON Schema', "format")
    return asked


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in _AS_THEY_ARE}
    found |= {"repetition_penalty": options.repeat_penalty, "stop": options.stop or None}
    if options.seed is not None and options.seed >= 0:
        found["seed"] = options.seed
    if options.num_predict is not None and options.num_predict > 0:
        found["max_tokens"] = options.num_predict
    return {name: value for name, value in found.items() if value is not None}


def _thinking(chat: dict[str, Any], request: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """Return the wish as variables of templates, which engines that take text understand, too."""
    if request.think is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        if isinstance(request.think, str):
            chat["reasoning_effort"] = request.think
    return chat


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages with ids of calls: results name the tool only, and answer its calls in their order."""
    ids = _Ids()
    return [_message(message, ids) for message in messages]


def _message(message: OllamaMessage, ids: _Ids) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _content(message.content or "", message.images)}
    if message.role == "tool":
        made["tool_call_id"] = ids.answered(message)
        if message.tool_name:
            made["name"] = message.tool_name
    if message.tool_calls:
        made["content"] = made["content"] or None
        made["tool_calls"] = [_call(call, ids) for call in message.tool_calls]
    if message.thinking:
        made["reasoning_content"] = message.thinking
    return made


def _call(call: OllamaCall, ids: _Ids) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return {"id": ids.called(call), "type": FUNCTION, FUNCTION: {"name": call.function.name, "arguments": arguments}}


class _Ids:
    """The ids of the calls of one conversation: the same for the same conversation, so that prompts stay the same."""

    def __init__(self) -> None:
        self._count = 0
        #: Id and name of the calls that have no result yet.
        self._open: list[tuple[str, str]] = []

    def called(self, call: OllamaCall) -> str:
        """Return the id of a call."""
        found = call.id or self._new()
        self._open.append((found, call.function.name))
        return found

    def answered(self, message: OllamaMessage) -> str:
        """Return the id of the call that a message gives the result of."""
        for one in self._open:
            if message.tool_call_id in (None, "", one[0]) and message.tool_name in (None, "", one[1]):
                self._open.remove(one)
                return one[0]
        return message.tool_call_id or self._new()

    def _new(self) -> str:
        self._count += 1
        return f"call_{self._count}"


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return the content; pictures become parts, which only engines that take the client's body know."""
    if not images:
        return text
    urls = [f"data:image/{_PICTURES.get(image[:4], 'png')};base64,{image}" for image in images]
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
